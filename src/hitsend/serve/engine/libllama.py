"""libllama as a plain shared library, declared by us and checked before it is trusted.

Enters: the path of a shared library (default: the one inside the xllamacpp wheel, whose Python classes stay unused).
Leaves: a `Library` whose functions are typed and whose struct layout is proved. Always true: the C ABI moves between
builds, so nothing is called before every needed symbol was found and the default parameters had the known values at the
known offsets; a build with RPC or one older than the GGUF parser's fixes is refused; the library's log never reaches a
terminal, its last lines go into our error messages. Next: `vocabulary.py`, `llama_decoder.py`.
"""

import contextlib
import ctypes as c
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.declarations import (
    CONVERTING,
    FUNCTIONS,
    HEAD,
    LAYOUTS,
    BatchStruct,
    ContextParams,
    KvOverride,
    LogCallback,
    ModelParams,
    Padded,
)

BUILD = 11549
"""The llama.cpp build of the pinned wheel, whose struct layout is declared below."""

PACKAGE_VERSION = f"2026.10.{BUILD}"

OLDEST_BUILD = 8146
"""The first build with all known fixes of the GGUF parser."""

UNKNOWN, CONTROL, USER_DEFINED, STRIPS_LEFT, STRIPS_RIGHT = 1, 8, 16, 128, 256
"""Token attributes, bits of `llama_vocab_get_attr`."""

ZENDNN = "zendnn"
"""In the name of a file: ggml's backend that keeps a copy of the weights, laid out for bfloat16 instructions."""

SPIN_COUNT = 300
"""How long threads spin at a barrier before they sleep. Milliseconds per decode step of 8 sequences on two cores, alone
and beside a second engine on the same cores: 0 gives 44 and 61, 300: 32 and 66, 1000: 30 and 77, 3000: 34 and 115, and
libgomp's own 300,000: 31 and more than a second."""

_PACKAGE = "xllamacpp"
_KEPT_LINES = 40
_WARN = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES = -1, -3, 32 * 1024 * 1024
_MOST_KEPT_BYTES = 64 * 1024 * 1024
_PR_SET_PDEATHSIG = 1
_OVERRIDE_BOOL = 2


class Library:
    """libllama, loaded and checked: `lib.llama_decode(...)` and so on. Handles are plain integers.

    `on_line` is told all that the library logs; it mustn't raise.
    """

    def __init__(self, path: str, functions: c.CDLL, build: int | None) -> None:
        self.path = path
        self.build = build
        self._functions = functions
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._backends: list[str] = []
        self.on_line: Callable[[str], None] | None = None
        self._callback = LogCallback(self._log)
        functions.llama_log_set(self._callback, None)
        functions.llama_backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in FUNCTIONS and name not in CONVERTING and name not in HEAD:
            raise AttributeError(name)
        exported = HEAD[name][0] if name in HEAD else name
        if not hasattr(self._functions, exported):
            part = "engine.speculation: {} can't run MTP heads" if name in HEAD else "engine.layout: {} can't convert"
            raise ConfigError(f"{part.format(self.path)}: it lacks {name}")
        function: Callable[..., Any] = getattr(self._functions, exported)
        return function

    @property
    def lacks_for_head(self) -> str:
        """The first function that it lacks to run an MTP head; empty: it can."""
        return next((name for name, (exported, *_) in HEAD.items() if not hasattr(self._functions, exported)), "")

    @property
    def name(self) -> str:
        """For records: `llama.cpp b11549`, with the backends that were added."""
        own = f"llama.cpp b{self.build}" if self.build else f"libllama ({Path(self.path).name})"
        return " + ".join((own, *self._backends))

    @property
    def is_packaged(self) -> bool:
        """Whether it is the wheel's."""
        return Path(self.path).name.startswith(_PACKAGE)

    @property
    def has_blas(self) -> bool:
        """Whether a BLAS was added, which makes all weights 32-bit numbers before each product."""
        return any(ZENDNN not in name for name in self._backends)

    def load_backend(self, path: str, where: str) -> None:
        """One more of ggml's backends, for all models that are loaded from now on. Raises ConfigError."""
        load = getattr(self._functions, "ggml_backend_load", None)
        if load is None:
            raise ConfigError(f"{where}: {self.path} can't load backends: it lacks ggml_backend_load")
        load.restype, load.argtypes = c.c_void_p, [c.c_char_p]
        self.take_lines()
        if not load(path.encode()):
            raise ConfigError(f"{where}: {path} can't be loaded: {self.take_lines() or 'no reason given'}")
        self._backends.append(Path(path).stem.removeprefix("lib"))

    def take_lines(self) -> str:
        """The warnings and errors that the library logged since the last call, on one line."""
        text = " ".join("".join(self._lines).split())
        self._lines.clear()
        return text[-1500:]

    def default_model_params(self) -> ModelParams:
        """`llama_model_default_params()`."""
        params: ModelParams = _defaults(self._functions, "llama_model_default_params", ModelParams)
        return params

    def default_context_params(self) -> ContextParams:
        """`llama_context_default_params()`."""
        params: ContextParams = _defaults(self._functions, "llama_context_default_params", ContextParams)
        return params

    def _log(self, level: int, text: bytes | None, _data: int | None) -> None:
        # Level 5 continues the line before it. An exception here would be printed by ctypes, so nothing may raise.
        if text and self.on_line is not None:
            self.on_line(text.decode("utf-8", "replace"))
        if text and level >= _WARN:
            self._lines.append(text.decode("utf-8", "replace")[:400])


def open_library(path: str | None = None) -> Library:
    """Load libllama from `path` or from the xllamacpp package. Raises ConfigError."""
    where = path or _packaged()
    # Read by libgomp and ggml when they load. No debugger is started after a failed assertion.
    os.putenv("GOMP_SPINCOUNT", str(SPIN_COUNT))
    os.putenv("GGML_NO_BACKTRACE", "1")
    try:
        functions = c.CDLL(where, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as failure:
        raise ConfigError(explain(where, str(failure))) from None
    missing = [name for name in (*FUNCTIONS, *LAYOUTS) if not hasattr(functions, name)]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigError(f"engine.libllama: {where} is not a usable libllama: it lacks {shown}")
    extras = CONVERTING | {exported: (result, arguments) for exported, result, arguments in HEAD.values()}
    extras = {name: types for name, types in extras.items() if hasattr(functions, name)}
    for name, (result, arguments) in (FUNCTIONS | extras).items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    build = _packaged_build() if path is None else _build_number(functions)
    if build is not None and build < OLDEST_BUILD:
        raise ConfigError(f"engine.libllama: {where} is llama.cpp b{build}; b{OLDEST_BUILD} or newer is needed")
    for name, (layout, expected) in LAYOUTS.items():
        _check_layout(where, name, _defaults(functions, name, layout), expected)
    if functions.llama_supports_rpc():
        raise ConfigError(f"engine.libllama: {where} was built with RPC, which has no fixed version: use one without")
    return Library(where, functions, build)


def explain(path: str, failure: str) -> str:
    """Why a library could not be loaded, in words that say what to do."""
    if "libgomp" in failure:
        return (
            "libllama needs the system library libgomp.so.1: install Debian's package libgomp1 (apt install libgomp1)"
        )
    return f"engine.libllama: can't load {path}: {failure}"


def override_bool(key: str, *, value: bool) -> Any:
    """A `kv_overrides` list with one entry; keep it until the model is loaded."""
    overrides = (KvOverride * 2)()
    overrides[0].tag, overrides[0].key, overrides[0].value.boolean = _OVERRIDE_BOOL, key.encode(), value
    return overrides


def address_of(structure: Any) -> int:
    """Where it lies, for a pointer field."""
    return c.addressof(structure)


def new_batch(
    arrays: tuple[NDArray[Any], ...], start: int, count: int, states: NDArray[np.float32] | None = None
) -> BatchStruct:
    """A `llama_batch` over `count` rows from row `start` of (token, pos, n_seq_id, seq_id pointers, logits) arrays.
    `states`: for an MTP head, what the model's last layer said of the token before. The arrays must outlive the call.
    """
    token, pos, n_seq_id, seq_id, logits = (a.ctypes.data + start * a.itemsize for a in arrays)
    return BatchStruct(count, token, None if states is None else states.ctypes.data, pos, n_seq_id, seq_id, logits)


def floats_at(address: int, num_rows: int, num_columns: int) -> NDArray[np.float32]:
    """The library's own memory as an array: copy it before the next call into the library."""
    flat = np.ctypeslib.as_array((c.c_float * (num_rows * num_columns)).from_address(address))
    return flat.reshape(num_rows, num_columns)


def set_default(name: str, value: str) -> None:
    """An environment variable of this process, for libraries that are loaded later, where it has none."""
    c.CDLL(None).setenv(name.encode(), value.encode(), 0)


def asked(path: str, name: str) -> int | None:
    """What a function without arguments says, of a library that is loaded or of those that it needs; None: there is
    none."""
    function = getattr(c.CDLL(path), name, None)
    return None if function is None else int(function())


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere the closed line does it)."""
    if sys.platform == "linux":
        c.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0)


def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of what this process frees for what it allocates next, arrays of up to 32 MiB among
    it (elsewhere nothing changes). By default it gives most of that back to the kernel, and memory that comes anew
    costs ten times as much as copying into it: a page fault each 4 KiB, for each saved prefix and each step's logits.
    Not without a bound: saved prefixes of very different lengths would then leave holes of half their size, instead of
    a quarter.
    """
    mallopt = getattr(c.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def _packaged() -> str:
    # find_spec does not import the package: its Python classes would bring a second owner of the library's state.
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for file in sorted(Path(folder).glob(f"{_PACKAGE}*.so")):
            return str(file)
    raise ConfigError("engine.libllama is not set and the package xllamacpp is not installed (pip install xllamacpp)")


def _build_number(functions: c.CDLL) -> int | None:
    with contextlib.suppress(ValueError):
        return c.c_int.in_dll(functions, "LLAMA_BUILD_NUMBER").value or None
    return None


def _packaged_build() -> int:
    # The wheel's own LLAMA_BUILD_NUMBER is zero; its version ends in the build.
    found = version(_PACKAGE)
    if found != PACKAGE_VERSION:
        raise ConfigError(f"xllamacpp is {found}; needed is exactly {PACKAGE_VERSION}: the C ABI moves between builds")
    return BUILD


def _defaults(functions: c.CDLL, name: str, layout: Any) -> Any:
    function = getattr(functions, name)
    function.restype, function.argtypes = Padded, []
    return layout.from_buffer_copy(function())


def _check_layout(path: str, name: str, found: c.Structure, expected: dict[str, Any]) -> None:
    # field descriptors know their types only through the instance, hence getattr
    for field in found._fields_:
        value, wanted = getattr(found, field[0]) or 0, expected.get(field[0], 0)
        if value != wanted:
            raise ConfigError(
                f"engine.libllama: {path} has another struct layout than llama.cpp b{BUILD}: "
                f"{name}().{field[0]} is {value}, expected {wanted}"
            )
