"""LoRA adapters: small changes to a model's weights, loaded beside it and switched on for one call at a time.

Enters: a loaded model, the settings' adapters. Leaves: `Adapters`. Always true: every file was judged before libllama
may see it (our own reading of its header: an adapter, of LoRA's kind, for this architecture); all are loaded before the
first context is made, as the library asks; a call has one adapter or none, and the library is told only of changes.
Next: `llama_decoder.py`.
"""

from collections.abc import Sequence

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.libllama import Library
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.settings import AdapterSettings


class _Loaded:
    """One adapter: its handle, and the two arrays of length 1 that the library reads it from."""

    def __init__(self, handle: int, scale: float) -> None:
        self.handles = np.array([handle], np.uint64)
        self.scales = np.array([scale], np.float32)


class Adapters:
    """All adapters of one model, by name. They live as long as the model."""

    def __init__(self, model: LoadedModel, architecture: str, files: Sequence[AdapterSettings] = ()) -> None:
        """Raises ConfigError."""
        self._library: Library = model.library
        self._by_name = {file.name: _load(model, architecture, file) for file in files}
        self._active: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """What `use` may be asked for."""
        return frozenset(self._by_name)

    def use(self, context: int, name: str | None) -> None:
        """Compute with this one from now on, or with the model as it is. Raises DecoderFailed."""
        if name == self._active:
            return
        if name is None:
            code = self._library.llama_set_adapters_lora(context, None, 0, None)
        else:
            one = self._by_name[name]
            code = self._library.llama_set_adapters_lora(context, one.handles.ctypes.data, 1, one.scales.ctypes.data)
        if code != 0:
            raise DecoderFailed(f"llama_set_adapters_lora returned {code} for {name!r}", is_fatal=True)
        self._active = name


def check_adapter(file: AdapterSettings, architecture: str) -> int:
    """Judge the file by its header; returns the bytes of its tensors. Raises ConfigError."""
    where = f"adapters[{file.name}].path"
    header = read_header(file.path, where)
    found = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    if found != ("adapter", "lora"):
        raise ConfigError(f"{where}: {file.path} is of type {found}, expected ('adapter', 'lora'): is it a model?")
    if header.architecture != architecture:
        raise ConfigError(f"{where}: {file.path} is for {header.architecture!r}, the model is {architecture!r}")
    if not header.num_tensors or header.num_tensors % 2:
        raise ConfigError(f"{where}: {file.path} has {header.num_tensors} tensors, expected pairs of A and B")
    if "adapter.alora.invocation_tokens" in {*header.metadata, *header.array_lengths}:
        raise ConfigError(f"{where}: {file.path} is an activated LoRA, which only works from certain words on")
    return header.tensor_bytes


def _load(model: LoadedModel, architecture: str, file: AdapterSettings) -> _Loaded:
    check_adapter(file, architecture)
    library = model.library
    library.take_lines()
    handle: int = library.llama_adapter_lora_init(model.handle, file.path.encode()) or 0
    if not handle:
        why = library.take_lines() or "no reason given"
        raise ConfigError(f"adapters[{file.name}].path: libllama can't load {file.path} for this model: {why}")
    return _Loaded(handle, file.scale)
