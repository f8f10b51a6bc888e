"""The planner: does it fit, what does it cost, and why.

Enters: a model, hardware, prices and traffic, as names, files and numbers. Leaves: plain data with every number that
led there. Always true: pure arithmetic over exact integers and fractions, no network, no event loop, no database,
nothing of the server; every formula has its source beside it; what isn't known is refused by name and never guessed.
Order of reading: `checkpoint.py`, `config.py`, `weights.py`, `facts.py`, then `memory.py` (with `blocks.py` and
`cells.py`), then `cost.py` and `tokens.py`.
"""
