"""Where keys, holds, the ledger and records are kept.

Enters: rows and statements from `access/` and `usage/`, which don't know each other and share only this. Leaves: rows.
Always true: every write goes through a transaction that either happened whole or not at all; what was acknowledged
survives a kill of the process and a power cut; nothing outside `connection.py` knows which database it is.
Next: `schema.py`, then `connection.py` and `writer.py`.
"""
