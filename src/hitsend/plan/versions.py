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
HIGHER_SHARE = (0, 21, 0)
"""`--gpu-memory-utilization` is 0.92 where nobody says: 0.9 in a log of 0.19.0, 0.92 in one of 0.27.1; which release
between them changed it wasn't found, the graphs are what it makes room for."""
LARGE_BATCH = (0, 27, 0)
"""A large GPU's step is 16,384 tokens where nobody says (vllm#51726, merged on 2026-08-10), and an A100 is one of them:
activations in logs of 0.27.1 on an RTX PRO 6000 and of 0.31.0 on an A100 are those of so many tokens."""
SECOND_RUNNER = (0, 27, 0)
"""Plain dense models are run by the second model runner: it keeps fewer copies, and captures its graphs beside the
share (three logs of 0.27.1 and 0.31.0)."""
UNIFIED_IS_LARGE = (0, 20, 0)
"""A GPU that shares the machine's memory counts as large: not in logs of 0.13 on a GB10, in those of 0.27.1."""
SHORT_VIDEOS = (0, 12, 0)
"""The encoder is no longer profiled with the longest video (logs of 0.11.0 and 0.13.0)."""
LIGHT_SAMPLER = (0, 16, 0)
"""Sampling sorts all logits no more (logs of 0.13.0 and 0.17.1; which release between them wasn't found)."""
WORKSPACE, NO_WORKSPACE = (0, 14, 0), (0, 26, 0)
"""An all-reduce workspace of more than a GiB beside NCCL's channels, on GPUs that NVLink joins: in logs of 0.17 to
0.20, not in those of 0.10 to 0.13 and 0.26 to 0.31."""
CHUNKED_FROM = 32_768
"""V0 computed prompts in pieces where longer ones were allowed."""
FIRST_CHUNK, LATER_CHUNK = 512, 2048
LATER_CHUNK_SINCE = (0, 6, 5)


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


def first_batch_tokens(version: str | None, max_model_len: int) -> int:
    """V0's tokens of a step: the longest prompt, or a piece of it."""
    if max_model_len <= CHUNKED_FROM:
        return max(2048, max_model_len)
    return LATER_CHUNK if _is_since(version, LATER_CHUNK_SINCE) else FIRST_CHUNK


def has_large_batch(version: str | None) -> bool:
    """Whether a large GPU's step holds 16,384 tokens by default."""
    return _is_since(version, LARGE_BATCH)


def has_second_runner(version: str | None) -> bool:
    """Whether plain dense models are run by the second model runner."""
    return _is_since(version, SECOND_RUNNER)


def is_unified_large(version: str | None) -> bool:
    """Whether memory that a GPU shares with the machine counts for its defaults."""
    return _is_since(version, UNIFIED_IS_LARGE)


def has_light_sampler(version: str | None) -> bool:
    """Whether sampling needs a few copies of the logits instead of a sort's."""
    return _is_since(version, LIGHT_SAMPLER)


def has_short_videos(version: str | None) -> bool:
    """Whether an encoder is profiled with less than the longest video."""
    return _is_since(version, SHORT_VIDEOS)


def has_workspace(version: str | None) -> bool:
    """Whether ranks keep an all-reduce workspace."""
    return _is_since(version, WORKSPACE) and not _is_since(version, NO_WORKSPACE)


def default_share(version: str | None) -> float:
    """`--gpu-memory-utilization` where nobody says."""
    return 0.92 if _is_since(version, HIGHER_SHARE) else 0.9


def _is_since(version: str | None, since: tuple[int, int, int]) -> bool:
    number = number_of(version)
    return number is None or number >= since


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
