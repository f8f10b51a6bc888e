"""The words every stage shares: requests, events, states, errors, the clock and the frames between processes.

Enters: nothing. Leaves: frozen data types. Always true: no I/O, no threads, no event loop, nothing that knows which
engine runs or which wire dialect was spoken. Read `request.py` first, then `lifecycle.py`, `events.py`, `record.py`.
"""
