"""Who is calling, and may they.

Enters: an Authorization header and the peer's address. Leaves: a `Principal` or InvalidApiKey. Always true: no request
waits for the database or an issuer here; secrets are never stored, compared in variable time, or written to a log. Read
`keys.py`, `terms.py` and `store.py` for what is granted, `rights.py` and `auth.py` for what comes of it, then
`oidc.py`.
"""
