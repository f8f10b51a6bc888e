"""What the engine's child does before its first step: judge the file, load it, make room, look at the machine.

Enters: a `WorkerConfig`. Leaves: a `LlamaDecoder`, its `EngineFacts`, a `Compiler` over its words. Always true: a file
that can't work is a ConfigError with a reason, raised before anything is allocated for it. Next: `libllama.py`.
"""

import math
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.blas import with_blas
from hitsend.serve.engine.grammar import Compiler
from hitsend.serve.engine.layouts import AS_SHIPPED
from hitsend.serve.engine.libllama import UNKNOWN, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.offsets import LAYOUT_KEY, offsets_bytes
from hitsend.serve.engine.shape import CellPlan, MemoryShape, memory_shape, plan_cells
from hitsend.serve.engine.speculating import check_head, way_to_speculate, why_no_head
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.unmet import Known, check_settings, undrafted, unmet
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.loop.pace import BLAS_PIECE, PIECE
from hitsend.serve.loop.roster import LoopLimits
from hitsend.settings import EngineSettings


def load(config: WorkerConfig, clock: Clock) -> tuple[LlamaDecoder, EngineFacts, Compiler]:
    """Judge the file, load it, make room for its sequences, warm up. Raises ConfigError."""
    settings, path = config.settings, config.model_path
    header, shape, plan = judged(config)
    library = with_blas(open_library(settings.libllama), settings.blas, header)
    check_head(header, library, settings)
    no_head = why_no_head(header, library, settings)
    model = LoadedModel(library, path, loads_head=not no_head)
    _check_decodes(model, header, path)
    adapters = Adapters(model, header, path, config.adapters)
    num_threads = settings.num_threads or num_cores()
    decoder = LlamaDecoder(
        model,
        plan,
        clock,
        step_tokens=settings.step_tokens,
        num_threads=num_threads,
        num_threads_alone=settings.num_threads_alone,
        is_unified=plan.is_unified,
        adapters=adapters,
        kv_type=settings.kv_type,
    )
    decoder.warm_up()
    speculation, why_not = way_to_speculate(decoder, settings, no_head)
    facts = EngineFacts(
        model=config.name,
        architecture=header.architecture,
        library=library.name,
        vocab_size=decoder.vocab_size,
        context_train=shape.context_train,
        num_slots=decoder.num_slots,
        num_cells=decoder.num_cells,
        cells_per_slot=decoder.cells_per_slot,
        kv_mode="unified" if plan.is_unified else "per_stream",
        kv_bytes_per_cell=shape.kv_bytes_per_cell,
        state_bytes_per_slot=shape.state_bytes_per_slot * (1 + decoder.num_snapshots),
        weights_bytes=library.llama_model_size(model.handle) + offsets_bytes(path, header),
        num_threads=num_threads,
        is_hybrid=model.is_recurrent,
        adapters=tuple(sorted(adapters.names)),
        cache_secret=secrets.token_hex(32),
        metadata=dict(model.metadata),
        layout=str(header.metadata.get(LAYOUT_KEY, AS_SHIPPED)),
        kv_type=settings.kv_type,
        speculation=speculation,
        speculation_reason=why_not,
        unmet=(*unmet(settings, Known(header, shape, plan, num_cores())), *undrafted(settings, why_not)),
        words=model.words_id(table := model.vocabulary.token_bytes()),
    )
    return decoder, facts, compiler_for(model, table)


def _check_decodes(model: LoadedModel, header: GgufHeader, path: str) -> None:
    library = model.library
    if library.llama_model_has_encoder(model.handle) or not library.llama_model_has_decoder(model.handle):
        raise ConfigError(f"engine.model: {path} is no decoder-only model ({header.architecture})")


def judged(config: WorkerConfig) -> tuple[GgufHeader, MemoryShape, CellPlan]:
    """What the file says of itself, and how the memory is divided. Raises ConfigError."""
    check_settings(config.settings)
    header = read_header(config.model_path)
    shape = memory_shape(header, config.settings.kv_type)
    return header, shape, plan_cells(shape, config.settings)


def limits_of(settings: EngineSettings, *, has_blas: bool) -> LoopLimits:
    """The loop's part of the settings, for a library with a BLAS backend or one without."""
    return LoopLimits(
        settings.step_tokens,
        settings.reserve_tokens,
        settings.max_waiting,
        settings.check_every_step,
        settings.aging_s,
        settings.tpot_target_s,
        settings.ttft_target_s,
        prefix_cache_bytes=settings.prefix_cache_bytes,
        prefix_step=settings.prefix_cache_step,
        prefix_answers=settings.prefix_cache_answers,
        prefix_disk_bytes=settings.prefix_cache_disk_bytes,
        piece=BLAS_PIECE if has_blas else PIECE,
    )


def compiler_for(model: LoadedModel, token_bytes: Sequence[bytes]) -> Compiler:
    """Grammars over this model's words, which `token_bytes` are."""
    words = model.vocabulary
    control = words.control | words.with_attribute(UNKNOWN)
    return Compiler(token_bytes, control, words.eog, words.tokenize)


def num_cores() -> int:
    """Cores that this process may really use: its affinity, and its control group's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, _quota(Path("/sys/fs/cgroup/cpu.max")) or cores))


def _quota(file: Path) -> int | None:
    try:
        quota, period = file.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None
