"""Who is calling, may they, and how much is left.

Enters: an Authorization header and the peer's address; later what a request may use at most. Leaves: a `Principal` or
InvalidApiKey; what is left of its rates, or a refusal. Always true: no request waits for the database or an issuer
here, but for what a budget has spent, once a month, nor for another server unless the settings name one; secrets are
never stored, compared in variable time, or written to a log. Read `keys.py`, `terms.py` and `store.py` for what is
granted, `rights.py` and `auth.py` for what comes of it, then `oidc.py`; for the limits `quota.py`, then `limits.py`,
`book.py` and `memory.py`; for those of several gateways `valkey.py`, `scripts.py`, `outage.py` and the scripts in
`lua/`.
"""
