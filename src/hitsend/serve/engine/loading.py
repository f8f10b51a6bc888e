"""What the engine's child does before its first step: judge the file, load it, make room, look at the machine.

Enters: a `WorkerConfig`. Leaves: a `LlamaDecoder`, its `EngineFacts`, a `Compiler` over its words. Always true: a file
that can't work is a ConfigError with a reason, raised before anything is allocated for it. Next: `libllama.py`.
"""

import math
import os
import sys
from pathlib import Path

import numpy as np

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.gguf_check import read_header
from hitsend.serve.engine.grammar import Compiler
from hitsend.serve.engine.libllama import UNKNOWN, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.shape import memory_shape, plan_cells
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch, Decoder
from hitsend.serve.loop.messages import EngineFacts


def load(config: WorkerConfig, clock: Clock) -> tuple[LlamaDecoder, EngineFacts, Compiler]:
    """Judge the file, load it, make room for its sequences, warm up. Raises ConfigError."""
    settings, path = config.settings, config.model_path
    header = read_header(path)
    shape = memory_shape(header)
    plan = plan_cells(shape, settings)
    library = open_library(settings.libllama)
    model = LoadedModel(library, path)
    if library.llama_model_has_encoder(model.handle) or not library.llama_model_has_decoder(model.handle):
        raise ConfigError(f"engine.model: {path} is no decoder-only model ({header.architecture})")
    num_threads = settings.num_threads or num_cores()
    decoder = LlamaDecoder(
        model,
        plan,
        clock,
        step_tokens=settings.step_tokens,
        num_threads=num_threads,
        is_unified=settings.kv_mode == "unified",
    )
    decoder.warm_up()
    speculation, why_not = speculation_for(decoder, settings.speculation)
    facts = EngineFacts(
        model=config.name,
        architecture=header.architecture,
        library=library.name,
        vocab_size=decoder.vocab_size,
        context_train=shape.context_train,
        num_slots=decoder.num_slots,
        num_cells=decoder.num_cells,
        cells_per_slot=decoder.cells_per_slot,
        kv_mode=settings.kv_mode,
        kv_bytes_per_cell=shape.kv_bytes_per_cell,
        state_bytes_per_slot=shape.state_bytes_per_slot,
        weights_bytes=library.llama_model_size(model.handle),
        num_threads=num_threads,
        is_hybrid=library.llama_model_is_hybrid(model.handle) or library.llama_model_is_recurrent(model.handle),
        metadata=dict(model.metadata),
        speculation=speculation,
        speculation_reason=why_not,
    )
    return decoder, facts, compiler_for(model)


def speculation_for(decoder: Decoder, asked: str) -> tuple[str, str]:
    """How tokens are guessed (`off`: not at all), and why not, where that wasn't asked for. The decoder holds nothing.

    Raises ConfigError where guessing was asked for by name and can't work.
    """
    if asked == "off":
        return "off", ""
    if can_go_back(decoder):
        return "prompt_lookup", ""
    reason = "the model keeps one state per sequence and can't take tokens back"
    if asked != "auto":
        raise ConfigError(f"engine.speculation: {asked} needs guesses to be taken back, but {reason}")
    return "off", reason


def can_go_back(decoder: Decoder) -> bool:
    """Whether the decoder forgets the last of some tokens when told to: tried, not believed."""
    one = np.ones(1, dtype=np.int32)
    try:
        for place in range(2):
            decoder.decode(Batch(one, place * one, 0 * one, np.ones(1, dtype=np.bool_)))
        return decoder.truncate(0, 1)
    finally:
        decoder.release(0)


def compiler_for(model: LoadedModel) -> Compiler:
    """Grammars over this model's words."""
    words = model.vocabulary
    control = words.control | words.with_attribute(UNKNOWN)
    return Compiler(words.token_bytes(), control, words.eog, words.tokenize)


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
