"""Products by another library, for types of weights whose kernels in libllama take a batch row by row.

ggml has a backend that turns a matrix into 32-bit numbers and gives it to `sgemm`, for products of 32 tokens and more:
twice as fast for Q4_1 with AVX-512, slower for BF16, of no use for what libllama lays out anew. It has another one,
ZenDNN, that keeps a copy of BF16 weights as the processor's own instructions want them. So one is loaded by the types
of the weights, and not compiled into the library.

Enters: `engine.blas`, a shared library made for the libllama that is loaded, and a model's header. Leaves: the library
with the backend in it. Always true: an OpenBLAS with threads of its own is refused, because they and libllama's wait
for each other (measured: 11 tokens/s instead of 195); nothing is loaded for weights that gain nothing; ZenDNN, which
knows its copies by address, gets only models in which nothing is multiplied but weights. Next: `loading.py`.
"""

from pathlib import Path

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader
from hitsend.serve.engine.calls import BLAS_FROM
from hitsend.serve.engine.libllama import ZENDNN, Library, asked, set_default
from hitsend.serve.engine.offsets import ARCHITECTURES, LAYOUT_KEY
from hitsend.serve.engine.requantise import BF16, Q4_1, Q5_0, Q5_1

NARROW = frozenset((Q4_1, Q5_0, Q5_1))
"""Types without kernels for several tokens at once."""

_OPENMP = 2
_FLOAT_BYTES = 4
_CPUINFO = Path("/proc/cpuinfo")


def gains_by(path: str, header: GgufHeader) -> bool:
    """Whether most bytes of the layers are of a type that this backend is faster with."""
    layers = [tensor for tensor in header.tensors if tensor.name.startswith("blk.") and len(tensor.dimensions) > 1]
    kinds = frozenset((BF16,)) if _is_zendnn(path) else NARROW
    fit = header.architecture in ARCHITECTURES if _is_zendnn(path) else LAYOUT_KEY not in header.metadata
    gaining = sum(tensor.num_bytes for tensor in layers if tensor.kind in kinds)
    return fit and 2 * gaining > sum(tensor.num_bytes for tensor in layers)


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
    if path is None or not gains_by(path, header):
        return library
    # By itself it takes only products of more than 128 tokens.
    set_default("GGML_ZENDNN_ADAPTIVE_FALLBACK", "0")
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
    """What the backend works in. ZenDNN: a copy of each BF16 matrix. BLAS: the largest matrix as 32-bit numbers; the
    words' one only where so many rows of logits are wanted at once."""
    if path is None or not gains_by(path, header):
        return 0
    if _is_zendnn(path):
        return sum(one.num_bytes for one in header.tensors if one.kind == BF16 and len(one.dimensions) > 1)
    has_words = num_slots >= 2 * BLAS_FROM - 1
    tensors = (one for one in header.tensors if has_words or one.name.startswith("blk."))
    matrices = (one.dimensions for one in tensors if len(one.dimensions) == 2)
    return _FLOAT_BYTES * max((int(np.prod(one, dtype=object)) for one in matrices), default=0)


def _is_zendnn(path: str) -> bool:
    return ZENDNN in Path(path).stem
