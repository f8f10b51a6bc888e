"""Which accelerator somebody means.

Enters: what was typed. Leaves: a `Gpu`. Always true: names are matched without the maker and without blanks, an unknown
one is refused with those that are known. Next: `overhead.py`.
"""

import re

from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Facts, Gpu

_BLACKWELL = ("b200", "b300", "gb200", "gb300", "gb10", "5090", "5080", "5070", "5060", "pro6000")
_LARGE_BYTES = 70 * 2**30
_NOT_LARGE = ("a100", "apple", "gaudi", "tpu")


def find_gpu(wanted: str, facts: Facts) -> Gpu:
    """Raises ConfigError that lists the known ones."""
    name = _plain(wanted)
    for gpu in facts.gpus:
        if name in {_plain(known) for known in (gpu.name, *gpu.aliases)}:
            return gpu
    partial = [gpu for gpu in facts.gpus if name and name in _plain(gpu.name)]
    if len(partial) == 1:
        return partial[0]
    raise ConfigError(
        f"--gpu {wanted}: {'more than one matches' if partial else 'not known'}; known are "
        + ", ".join(next(iter(gpu.aliases), gpu.name) for gpu in facts.gpus)
        + "; add your own with --facts FILE"
    )


def is_blackwell(gpu: Gpu) -> bool:
    """NVIDIA's generation with 4-bit arithmetic."""
    return any(part in _plain(gpu.name) for part in _BLACKWELL)


def is_large(gpu: Gpu) -> bool:
    """What vLLM gives bigger default batches: 70 GiB and more, A100 left out (its `EngineArgs`)."""
    return gpu.memory_bytes >= _LARGE_BYTES and not any(part in _plain(gpu.name) for part in _NOT_LARGE)


def is_unified(gpu: Gpu) -> bool:
    """Whether NVIDIA's driver can't say how much memory is the GPU's own."""
    return "gb10" in _plain(gpu.name)


def is_a100(gpu: Gpu) -> bool:
    """vLLM's defaults name it."""
    return "a100" in _plain(gpu.name) and gpu.memory_bytes >= _LARGE_BYTES


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold().replace("nvidia", "").replace("amd", "").replace("geforce", ""))
