"""Tokens become text that is safe to show.

Enters: sampled tokens of one choice, in any portions. Leaves: `Delta`s whose texts, joined, are the answer, and the
events that say what was held back and why. Always true: no half UTF-8 character, no piece of a matched stop string, the
same text at any split, everything held is released at the end; pure code, one object per choice.
Read `detokenize.py`, `stop.py`, `source.py` (text that parsers can wait for), `reasoning.py`, `calls.py`,
`tool_calls.py` and the three ways to write calls, `reader.py`, then `assemble.py`, which joins them.
Next chapter: `../stream/`.
"""
