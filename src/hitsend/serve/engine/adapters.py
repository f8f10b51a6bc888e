"""LoRA adapters: small changes to a model's weights, loaded beside it and switched on for one call at a time.

Enters: a loaded model, the settings' adapters. Leaves: `Adapters`. Always true: every file was judged before libllama
may see it (our own reading of its header: an adapter, of LoRA's kind, for this architecture); all are loaded before the
first context is made, as the library asks; a call has one adapter or none, beside it the offsets that belong to the
weights where their layout has some, always; the library is told only of changes.
Next: `llama_decoder.py`.
"""

from collections.abc import Sequence

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.libllama import Library
from hitsend.serve.engine.offsets import TIMES, check_whole, offsets_beside
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.settings import AdapterSettings

_OFFSETS = "offsets"


class _Set:
    """Adapters that work together: arrays of their handles and scales, for the library."""

    def __init__(self, *each: tuple[int, float]) -> None:
        self.handles = np.array([handle for handle, _ in each], np.uint64)
        self.scales = np.array([scale for _, scale in each], np.float32)


class Adapters:
    """All adapters of one model, by name, for one context. They live as long as the model."""

    def __init__(
        self,
        model: LoadedModel,
        header: GgufHeader,
        path: str,
        files: Sequence[AdapterSettings] = (),
        where: str = "engine.layout",
    ) -> None:
        """`header` and `path` are those of the model's file, `where` the setting to blame. Raises ConfigError."""
        self._library: Library = model.library
        offsets = offsets_beside(path, header, where)
        always = []
        if offsets is not None:
            file = AdapterSettings(name=_OFFSETS, path=str(offsets), scale=1 / TIMES)
            always.append(_load(model, header.architecture, file))
        self.names = frozenset(file.name for file in files)
        """What `use` may be asked for."""
        self._sets: dict[str | None, _Set] = {None: _Set(*always)}
        for file in files:
            check_adapter(file, header.architecture)
        self._sets |= {file.name: _Set(*always, _load(model, header.architecture, file)) for file in files}
        self._active = _Set()

    def use(self, context: int, name: str | None) -> None:
        """Compute with this one from now on, or with the model as it is. Raises DecoderFailed."""
        wanted = self._sets[name]
        if wanted is self._active or not (len(wanted.handles) or len(self._active.handles)):
            return
        pointers = wanted.handles.ctypes.data, len(wanted.handles), wanted.scales.ctypes.data
        code = self._library.llama_set_adapters_lora(context, *(pointers if len(wanted.handles) else (None, 0, None)))
        if code != 0:
            raise DecoderFailed(f"llama_set_adapters_lora returned {code} for {name!r}", is_fatal=True)
        self._active = wanted


def check_adapter(file: AdapterSettings, architecture: str) -> int:
    """Judge a user's file by its header; returns the bytes of its tensors. Raises ConfigError."""
    header = _judged(file, architecture)
    check_whole(file.path, header, f"adapters[{file.name}].path")
    return header.tensor_bytes


def _judged(file: AdapterSettings, architecture: str) -> GgufHeader:
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
    return header


def _load(model: LoadedModel, architecture: str, file: AdapterSettings) -> tuple[int, float]:
    _judged(file, architecture)
    library = model.library
    library.take_lines()
    handle: int = library.llama_adapter_lora_init(model.handle, file.path.encode()) or 0
    if not handle:
        why = library.take_lines() or "no reason given"
        raise ConfigError(f"adapters[{file.name}].path: libllama can't load {file.path} for this model: {why}")
    return handle, file.scale
