"""Who is calling, and may they.

Enters: an Authorization header and the peer's address. Leaves: a `Principal` or InvalidApiKey. Always true: no request
waits for the database here; secrets are never stored, compared in variable time, or written to a log. Read `keys.py`,
then `store.py` and `auth.py`.
"""
