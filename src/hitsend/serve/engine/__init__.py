"""Engines: where the tokens come from.

Enters: a `Job` (prompt ids, sampling, bounds). Leaves: a `Generation`, an async iterator of events. Always true:
closing a generation *is* cancelling it, every choice ends once, and an engine never sees keys, prices or wire formats.
Order of reading: `protocol.py`, `embedded.py` (the edge's side), `worker.py` (the child's side), `libllama.py` (the
only ctypes), `models.py` (which file to load). Vectors come from elsewhere: `embedder.py`, `embedding_worker.py`.
"""
