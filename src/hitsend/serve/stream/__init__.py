"""The way to the client.

Enters: encoded frames, as `api/` makes them from deltas. Leaves: bytes on the socket, and what was seen of the client
meanwhile. Always true: a client that has gone is noticed in every phase and its work is cancelled and waited for; a
waiting client gets a sign of life; a stream ends with [DONE] or with exactly one error frame.
Read `sse.py`, `deliver.py`, then `connection.py`. Next chapter: `../usage/`.
"""
