"""Batches: many requests as one file, worked off in capacity that nobody else wants.

Enters: batches that `api/batches.py` took, and their files. Leaves: an output file and an error file. Always true: a
line is a request like any other, through the same routes, keys, limits, holds, ledger and records, only at the lowest
tier, at the batch price, and begun only while nobody waits; every line is answered once and billed once, however often
the server dies meanwhile. Next: `input.py`.
"""
