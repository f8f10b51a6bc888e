"""The history of the schema, one file per step under `versions/`.

Enters: a connection, by `env.py`. Leaves: tables. Always true: a file that was released is never changed again.
"""
