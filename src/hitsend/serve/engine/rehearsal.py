"""What an engine's process will take, found by going through its start without its weights and cells.

libllama can load a model and make a context without allocating what they are made of: it plans the buffers that it
would compute in, and says how large they are. What remains (the interpreter, the vocabulary, the words for grammars,
the cells' books) this process then really has, so it is measured instead of guessed.

Enters: a `WorkerConfig` whose header was judged. Leaves: a `Memory`. Always true: takes under a second and allocates
neither weights nor cells; a file that libllama refuses has no rehearsal (it would not be served either); to be done
once per process, because what an earlier one left would count. Next: `sizing.py`.
"""

import os
import re
import resource
from pathlib import Path

import msgspec

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.adapters import check_adapter
from hitsend.serve.engine.blas import blas_bytes
from hitsend.serve.engine.grammar import Compiler
from hitsend.serve.engine.libllama import Library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.loading import compiler_for, num_cores
from hitsend.serve.engine.offsets import offsets_bytes
from hitsend.serve.engine.shape import CellPlan, head_bytes, memory_shape, num_states
from hitsend.serve.engine.speculating import check_words
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.settings import EngineSettings

EDGE_BYTES, TEXT_BYTES = 108 * 1024 * 1024, 99 * 1024 * 1024
"""A gateway's own process and its text process with a vocabulary of 49,152 words, after some requests."""
_COMPUTE = re.compile(r"compute buffer size = +([0-9.]+) MiB")
_STATE = re.compile(r"RS buffer size = +([0-9.]+) MiB")
_STATM = Path("/proc/self/statm")
_MIB = 1024 * 1024
_LOGIT_BYTES = 4
_LOGIT_ROWS = 2
"""Of each slot: the library's own, and the loop's copy (of steps that are several calls)."""
_ROWS, _HYBRID_ROWS = 16, 80
"""Rows of logits that a step has room for, where there are fewer slots: drafts and scored prompts want more than one
each. The second was found by measuring: models with recurrent layers work in more than their plan says."""
_OWN_BYTES = 2 * 1024 * 1024
"""What a process that rehearses has and an engine's hasn't: asyncio, and how it speaks with children."""
_REPACKS = "CPU_REPACK model buffer"
_REPACKED = {2, 10, 12, 20}
"""ggml's types that libllama's processor backend lays out anew (Q4_0, Q2_K, Q4_K, IQ4_NL), as far as it says that it
does: then the mapped file and the copy are both in memory."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes of one engine's process when all of its slots are in use.

    `repacked`: weights laid out anew for this processor, beside the mapped file. `compute`: what the library computes
    in, and logits. `process`: the interpreter, libraries, vocabulary. Saved prefixes (`engine.prefix_cache_bytes`) come
    on top as they are saved, more rows of logits where prompts are scored or drafts are verified.
    """

    weights: int = 0
    cells: int = 0
    state: int = 0
    adapters: int = 0
    repacked: int = 0
    compute: int = 0
    process: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        beside = self.repacked + self.compute + self.process
        return self.weights + self.adapters + self.cells + self.state + beside


def predicted(config: WorkerConfig, plan: CellPlan, library: Library) -> Memory:
    """What the engine's process will take; without a rehearsal, `compute` and `process` are 0. Raises ConfigError."""
    settings = config.settings
    models = [(config.model_path, settings.kv_type, "engine.layout")]
    if settings.draft_model is not None and settings.speculation in {"auto", "draft"}:
        models.append((settings.draft_model, "f16", "engine.draft_model"))
    memory = Memory()
    for path, kv_type, where in models:
        header = read_header(path)
        shape = memory_shape(header, kv_type)
        memory = msgspec.structs.replace(
            memory,
            weights=memory.weights + header.tensor_bytes,
            adapters=memory.adapters + offsets_bytes(path, header, where),
            cells=memory.cells + plan.num_cells * shape.kv_bytes_per_cell,
            state=memory.state + num_states(plan, settings) * shape.state_bytes_per_slot,
        )
    header = read_header(config.model_path)
    adapters = sum(check_adapter(file, header.architecture) for file in config.adapters)
    memory = msgspec.structs.replace(
        memory,
        cells=memory.cells + head_bytes(header, plan, settings),
        adapters=memory.adapters + adapters,
    )
    try:
        found = [_rehearsed(path, plan, settings, library, kv_type) for path, kv_type, _ in models]
    except ConfigError:
        return memory
    compute, repacked = sum(each.compute for each in found), sum(each.repacked for each in found)
    compute += blas_bytes(settings.blas, header, plan.num_slots)
    process = resident_bytes() - _OWN_BYTES
    if len(models) > 1:  # last: it takes memory
        own, draft = (LoadedModel(library, path, vocab_only=True).vocabulary.token_bytes() for path, _, _ in models)
        check_words(models[1][0], draft, own, config.name)
    return msgspec.structs.replace(memory, compute=compute, repacked=repacked, process=process)


def resident_bytes() -> int:
    """What this process has in memory now."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if _STATM.exists() else most


class _Rehearsed(msgspec.Struct, frozen=True):
    """Bytes of the buffers that would be computed in, with logits; of repacked weights; and what stays in memory."""

    compute: int
    repacked: int
    compiler: Compiler


def _rehearsed(path: str, plan: CellPlan, settings: EngineSettings, library: Library, kv_type: str) -> _Rehearsed:
    """Raises ConfigError."""
    lines: list[str] = []
    library.on_line = lines.append
    try:
        model = LoadedModel(library, path, is_rehearsal=True)
        LlamaDecoder(
            model,
            plan,
            SystemClock(),
            step_tokens=settings.step_tokens,
            num_threads=settings.num_threads or num_cores(),
            is_unified=plan.is_unified,
            kv_type=kv_type,
            num_outputs=max(plan.num_slots, _HYBRID_ROWS if model.is_recurrent else _ROWS),
        )
    finally:
        library.on_line = None
    said = "".join(lines)
    # the recurrent state alone is allocated in a rehearsal, too
    buffers = sum(map(float, _COMPUTE.findall(said))) - sum(map(float, _STATE.findall(said)))
    logits = plan.num_slots * model.vocabulary.num_tokens * _LOGIT_BYTES * _LOGIT_ROWS
    copies = _copies(path) if _REPACKS in said else 0
    return _Rehearsed(int(buffers * _MIB) + logits, copies, compiler_for(model, model.vocabulary.token_bytes()))


def _copies(path: str) -> int:
    """Bytes of the matrices that are laid out anew."""
    blocks = (tensor for tensor in read_header(path).tensors if tensor.name.startswith("blk."))
    return sum(tensor.num_bytes for tensor in blocks if tensor.kind in _REPACKED and len(tensor.dimensions) > 1)


def server_bytes(memory: Memory) -> int:
    """Of a whole server with one such engine and one gateway."""
    return memory.total + EDGE_BYTES + TEXT_BYTES
