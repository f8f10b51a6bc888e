"""The loop: what runs inside the engine's child process, without the arithmetic.

Enters: commands (`messages.py`) and a `Decoder` (`decoder.py`). Leaves: reports. Always true: the loop never awaits,
never reads a socket and never sees text; computed tokens catch up with known tokens, and there is no other phase.
Order of reading: `messages.py`, `sequence.py`, `kv.py`, `pace.py`, `scheduler.py`, `gaps.py`, `sampler.py`, `step.py`.
"""
