"""Who is calling, may they, and how much is left.

Enters: an Authorization header and the peer's address; later what a request may use at most. Leaves: a `Principal` or
InvalidApiKey; what is left of its rates, or a refusal. Always true: no request waits for the database here, except for
what a budget's level has spent, once a month; secrets are never stored, compared in variable time, or written to a log.
Read `keys.py`, then `store.py` and `auth.py`; for the limits `quota.py`, then `limits.py`, `book.py` and `memory.py`.
"""
