"""What of a sequence others may find in the prefix cache: while it runs, and when it has ended.

Enters: a sequence and the cache's rules. Leaves: an `Entry`, or None where nothing of it is worth keeping. Always true:
only whole steps of a prompt count as exact, because only these were computed as anybody would compute them.
Next: `prefix_cache.py`.
"""

from hitsend.serve.loop.prefix_cache import CacheRules, Entry, ids
from hitsend.serve.loop.sequence import Sequence

CHECKPOINT_TOKENS = 512
"""A model that can't go back leaves a checkpoint each time so many tokens of a prompt are computed."""

MAX_CHECKPOINTS = 8
"""Most of one prompt: the last ones are worth most to its next turn."""


def entry_of_runner(sequence: Sequence, rules: CacheRules, at: float) -> Entry | None:
    """Its prompt, as far as it gets: nothing of a sequence that goes on after a preemption."""
    if sequence.cache_salt is None or sequence.num_output_tokens:
        return None
    prompt = sequence.prompt_ids
    entry = Entry(sequence.cache_salt, prompt, at=at, num_exact=_floor(len(prompt), rules))
    entry.owner, entry.slot, entry.num_ready = sequence, sequence.slot, sequence.num_computed_tokens
    if rules.is_whole:
        entry.points = _checkpoints(sequence, rules)
    return entry


def entry_left_by(sequence: Sequence, rules: CacheRules, at: float) -> Entry | None:
    """All that it computed, where somebody could use it."""
    count = sequence.num_computed_tokens
    if sequence.cache_salt is None:
        return None
    exact = min(_floor(sequence.num_prompt_tokens, rules), count)
    useful = count if rules.takes_inexact else exact
    if useful < rules.step or (rules.is_whole and useful < count):
        return None
    entry = Entry(sequence.cache_salt, ids(sequence.token_ids[:count]), at=at, num_exact=exact)
    entry.hits = sequence.num_reuses
    return entry


def _floor(num_tokens: int, rules: CacheRules) -> int:
    return num_tokens // rules.step * rules.step


def _checkpoints(sequence: Sequence, rules: CacheRules) -> tuple[int, ...]:
    """Where its messages end and every so many tokens, as far as it has still to compute them."""
    most = len(sequence.prompt_ids) - 1
    every = range(CHECKPOINT_TOKENS, most + 1, CHECKPOINT_TOKENS)
    points = {_floor(min(point, most), rules) for point in (*sequence.boundaries, *every)}
    ahead = sorted(point for point in points if point > sequence.num_computed_tokens)
    return tuple(ahead[-MAX_CHECKPOINTS:])
