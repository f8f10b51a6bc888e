"""Who is calling, may they, and how much is left.

Enters: an Authorization header and the peer's address; later what a request may use at most. Leaves: a `Principal` or
InvalidApiKey; what is left of its rates, or a refusal. Always true: no request waits for the database here, except for
what a budget's level has spent, once a month, nor for another server unless the settings name one; secrets are never
stored, compared in variable time, or written to a log.
Read `keys.py`, then `store.py` and `auth.py`; for the limits `quota.py`, then `limits.py`, `book.py` and `memory.py`;
for those of several gateways `valkey.py`, `scripts.py`, `outage.py` and the scripts in `lua/`.
"""
