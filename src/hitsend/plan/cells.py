"""llama.cpp's cells, hitsend's own pool of them, and SGLang's token pool.

Enters: bytes per token and per sequence, what is free, and the sequences' length. Leaves: how many tokens and
sequences fit. Always true: llama.cpp's cache is a rectangle of cells made at start-up, windows have one of their own,
and recurrent states one slot per sequence and draft; hitsend shares one rectangle among all sequences; SGLang gives
states a fixed part of the pool. Next: `overhead.py`.
"""

import math
from fractions import Fraction

import msgspec

CELL_STEP = 256
"""libllama rounds a cache's cells to this."""
SGLANG_STATE_SHARE = Fraction(9, 19)
"""SGLang's `mamba_full_memory_ratio` of 0.9: states get 0.9 of what keys and values get (its log for Qwen3.5-9B)."""
SGLANG_WINDOW_SHARE = Fraction(8, 10)
"""SGLang's `swa_full_tokens_ratio`: tokens of the window pool per token of the other."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on one rank over all layers of a stage."""

    growing: Fraction
    """Per token, by layers that keep every token."""
    windowed: Fraction
    """Per token, by layers that keep a window of them."""
    window_tokens: int
    state: int
    """Per sequence, one copy."""


class CellPool(msgspec.Struct, frozen=True, kw_only=True):
    """What fits: tokens in all, and sequences of the length asked for."""

    tokens: int
    sequences: Fraction
    state_slots: int | None = None


def padded(cells: int) -> int:
    """Rounded up to a whole step."""
    return -(-cells // CELL_STEP) * CELL_STEP


def window_cells(window: int, sequences: int, ubatch: int, context: int) -> int:
    """kv_rules 5: pad256(window * sequences + ubatch), never more than the context."""
    return min(padded(window * sequences + ubatch), padded(context))


def llama_bytes(costs: Costs, sequences: int, length: int, *, ubatch: int, drafts: int) -> Fraction:
    """What llama.cpp allocates for so many sequences of one length. kv_rules 2 and 5: states times (1 + drafts)."""
    cells = padded(length) * sequences
    windows = window_cells(costs.window_tokens, sequences, ubatch, cells) if costs.windowed else 0
    return cells * costs.growing + windows * costs.windowed + sequences * costs.state * (1 + drafts)


def llama_pool(costs: Costs, available: int, length: int, *, ubatch: int, drafts: int) -> CellPool:
    """The most sequences of that length whose allocation fits, found by halving."""
    low, high = 0, 1
    while llama_bytes(costs, high, length, ubatch=ubatch, drafts=drafts) <= available and high < 2**30:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        fits = llama_bytes(costs, middle, length, ubatch=ubatch, drafts=drafts) <= available
        low, high = (middle, high) if fits else (low, middle)
    fixed = llama_bytes(costs, max(1, low), length, ubatch=ubatch, drafts=drafts)
    fixed -= padded(length) * max(1, low) * costs.growing
    tokens = math.floor((available - fixed) / costs.growing) if costs.growing else low * length
    return CellPool(tokens=max(0, tokens) // CELL_STEP * CELL_STEP, sequences=Fraction(low))


def shared_pool(costs: Costs, available: int, length: int) -> CellPool:
    """hitsend, `kv_mode` unified: every layer keeps every token, slots share the cells, each slot has its own state.

    Source: the engine's own division of its budget, which a test compares with this.
    """
    per_token = costs.growing + costs.windowed
    each = padded(length) * per_token + costs.state
    slots = math.floor(available / each) if each else 0
    left = max(0, available - max(1, slots) * costs.state)
    tokens = math.floor(left / per_token) if per_token else slots * length
    part = Fraction(left) / (padded(length) * per_token) if per_token and not slots else Fraction(slots)
    return CellPool(tokens=tokens // CELL_STEP * CELL_STEP, sequences=part, state_slots=slots)


def sglang_pool(costs: Costs, available: int, length: int) -> CellPool:
    """One token per page. With recurrent layers 9/19 of the bytes become state slots, one of them spare."""
    states = math.floor(available * SGLANG_STATE_SHARE) if costs.state else 0
    slots = max(0, states // costs.state - 1) if costs.state else None
    per_token = costs.growing + costs.windowed * SGLANG_WINDOW_SHARE
    tokens = math.floor((available - states) / per_token) if per_token else 0
    sequences = Fraction(tokens, length) if per_token else Fraction(slots or 0)
    return CellPool(
        tokens=tokens, sequences=sequences if slots is None else min(sequences, Fraction(slots)), state_slots=slots
    )
