"""Wide products by a BLAS library, for types of weights whose kernels in libllama take a batch row by row.

ggml has a backend that turns a matrix into 32-bit numbers and gives it to `sgemm`, for products of 32 tokens and more.
Twice as fast for Q4_1 with AVX-512, slower for BF16, of no use for what libllama lays out anew; so it is loaded by the
types of the weights, and not compiled into the library.

Enters: `engine.blas`, a shared library made for the libllama that is loaded, and a model's header. Leaves: the library
with the backend in it. Always true: an OpenBLAS with threads of its own is refused, because they and libllama's wait
for each other (measured: 11 tokens/s instead of 195); nothing is loaded for weights that gain nothing. Next:
`loading.py`.
"""

from pathlib import Path

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader
from hitsend.serve.engine.calls import BLAS_FROM
from hitsend.serve.engine.libllama import Library, asked, set_default
from hitsend.serve.engine.offsets import LAYOUT_KEY
from hitsend.serve.engine.requantise import Q4_1, Q5_0, Q5_1

NARROW = frozenset((Q4_1, Q5_0, Q5_1))
"""Types without kernels for several tokens at once."""

_OPENMP = 2
_FLOAT_BYTES = 4
_CPUINFO = Path("/proc/cpuinfo")


def gains_by_blas(header: GgufHeader) -> bool:
    """Whether most bytes of the layers are of such a type, as shipped."""
    layers = [tensor for tensor in header.tensors if tensor.name.startswith("blk.") and len(tensor.dimensions) > 1]
    narrow = sum(tensor.num_bytes for tensor in layers if tensor.kind in NARROW)
    return LAYOUT_KEY not in header.metadata and 2 * narrow > sum(tensor.num_bytes for tensor in layers)


def check_blas(path: str | None, library: Library) -> None:
    """Whether it could be loaded, if the weights gained by it. Raises ConfigError."""
    if path is not None and library.is_packaged:
        raise ConfigError("engine.blas: engine.libllama isn't set: a backend needs the library that it was made for")
    if path is not None and not Path(path).is_file():
        raise ConfigError(f"engine.blas: there is no file {path}")


def with_blas(library: Library, path: str | None, header: GgufHeader) -> Library:
    """The library, with the backend in it where the model gains by it: to be asked before it is loaded. Raises
    ConfigError."""
    check_blas(path, library)
    if path is None or not gains_by_blas(header):
        return library
    # An OpenBLAS that is older than the processor takes it for one with AVX2.
    if _CPUINFO.exists() and " avx512bw " in _CPUINFO.read_text("ascii", "replace"):
        set_default("OPENBLAS_CORETYPE", "SKYLAKEX")
    library.load_backend(path, "engine.blas")
    if asked(path, "openblas_get_parallel") not in {None, _OPENMP}:
        raise ConfigError(
            f"engine.blas: the OpenBLAS of {path} has threads of its own, which get in the way of libllama's: "
            "one that was built with OpenMP is needed (Debian: libopenblas-openmp-dev)"
        )
    return library


def blas_bytes(path: str | None, header: GgufHeader, num_slots: int) -> int:
    """What the backend works in: the largest matrix as 32-bit numbers; the words' one only where so many rows of logits
    are wanted at once."""
    if path is None or not gains_by_blas(header):
        return 0
    has_words = num_slots >= 2 * BLAS_FROM - 1
    tensors = (one for one in header.tensors if has_words or one.name.startswith("blk."))
    matrices = (one.dimensions for one in tensors if len(one.dimensions) == 2)
    return _FLOAT_BYTES * max((int(np.prod(one, dtype=object)) for one in matrices), default=0)
