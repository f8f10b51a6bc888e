"""What changed in vLLM from one version to the next, as far as memory is concerned.

Enters: a version as somebody wrote it. Leaves: yes or no. Always true: an unknown version is the newest. Next:
`memory.py`.
"""

import re
from fractions import Fraction

NEW_LOG = (0, 20, 1)
"""The log's "GPU KV cache size" became int(max_concurrency * max_model_len): 0.20.0 and the builds on the way to 0.20.1
(rc1.dev16, club-3090#46) still print the old one, 0.20.1 (club-3090#91) the new one."""
WINDOW_GROUPS = (0, 10, 0)
"""Sliding layers got groups of their own with the hybrid allocator."""

CHUNKED_PREFILL = (0, 8, 0)
"""V1 became the default: a step's batch no longer has to hold a whole prompt."""
PACKED_PAGES = (0, 23, 0)
"""Of DeepSeek-V4: a block holds only as many pages of a size as some group has (its source; no log was at hand)."""
DENSE_PAGES = (0, 27, 0)
"""Of DeepSeek-V4: a block holds the largest group's pages, whatever their sizes, and a request's blocks are simply
those of all its groups (vllm#48993). A log of 0.26.0 (vllm#51041) is the older sum, one of 0.31.1 this one; no log lies
between."""
TWO_STEPS = (0, 26, 0)
"""What leaves a window is freed when its step has been processed, so a step that is in flight counts as well
(vllm#47728; vllm#49878 is the complaint about 0.26.0)."""
WIDER_GROUPS, WIDE_GROUPS = (0, 18, 0), (0, 12, 0)
"""How much more layers the largest kind may have than the smallest to be padded to: a half (vllm#36684), before that
a quarter (vllm#29303), before that nothing."""
GRAPHS_IN_POOL = (0, 21, 0)
"""The memory profile measures the graphs too."""


def number_of(version: str | None) -> tuple[int, ...] | None:
    """`v0.18.2rc1.dev73+gdb7` is (0, 18, 2). None where it holds no number of that form."""
    found = re.search(r"(?<![\d.])v?(\d+)\.(\d+)(?:\.(\d+))?", version or "")
    return None if found is None else tuple(int(part or 0) for part in found.groups())


def has_new_log(version: str | None) -> bool:
    """Whether the printed cache size is the newer formula."""
    number = number_of(version)
    return number is None or number > NEW_LOG or (number == NEW_LOG and "dev" not in (version or ""))


def has_window_groups(version: str | None) -> bool:
    """Whether sliding layers are charged for their window only."""
    number = number_of(version)
    return number is None or number >= WINDOW_GROUPS


def has_chunked_prefill(version: str | None) -> bool:
    """Whether a profiled step is smaller than the longest prompt."""
    number = number_of(version)
    return number is None or number >= CHUNKED_PREFILL


def has_packed_pages(version: str | None) -> bool:
    """Whether a block of a compressed cache leaves out pages that no group fills."""
    number = number_of(version)
    return number is None or number >= PACKED_PAGES


def has_graphs_in_pool(version: str | None) -> bool:
    """Whether graphs are taken off the pool."""
    number = number_of(version)
    return number is None or number >= GRAPHS_IN_POOL


def has_dense_pages(version: str | None) -> bool:
    """Whether a block of a compressed cache is as large as its largest group, without holes."""
    number = number_of(version)
    return number is None or number >= DENSE_PAGES


def steps_in_flight(version: str | None, pp: int) -> int:
    """Steps whose tokens a window keeps besides its own: scheduling runs one step ahead, or as many as there are
    pipeline stages."""
    number = number_of(version)
    return max(2, pp) if number is None or number >= TWO_STEPS else 1


def group_slack(version: str | None) -> Fraction:
    """The largest kind of layers sets the groups' size while it has less than so many times the smallest's layers."""
    number = number_of(version)
    if number is None or number >= WIDER_GROUPS:
        return Fraction(3, 2)
    return Fraction(5, 4) if number >= WIDE_GROUPS else Fraction(1)
