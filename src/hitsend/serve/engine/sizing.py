"""What a model would be and take, found out without loading it: a child that reads headers only.

    python -m hitsend.serve.engine.sizing --fd N

Enters: one `WorkerConfig` per model. Leaves: `Sized` or `LoadFailed` for each, in order. Always true: no file is parsed
in the edge's process; the facts are those that the engine's child will find when it loads the model, but for what only
the library can say (the metadata as text). Next: `shape.py`.
"""

import asyncio
import os
import resource
import sys
from collections.abc import Sequence

import msgspec

from hitsend.core.errors import ConfigError, EngineUnavailable
from hitsend.gguf import read_header
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.serve.engine.adapters import check_adapter
from hitsend.serve.engine.libllama import die_with_parent, open_library
from hitsend.serve.engine.loading import num_cores
from hitsend.serve.engine.shape import memory_shape, plan_cells, predicted_bytes
from hitsend.serve.engine.startup import LoadFailed, WorkerConfig, config_decoder, encode
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.parent import ParentLine

_TIMEOUT_S = 60.0


class Sized(msgspec.Struct, frozen=True, tag="sized"):
    """`num_bytes`: weights, adapters, cells and state together."""

    facts: EngineFacts
    num_bytes: int


_answers = msgspec.msgpack.Decoder(Sized | LoadFailed)


def size(config: WorkerConfig) -> Sized:
    """Read the headers and divide the budget. Raises ConfigError."""
    settings = config.settings
    header = read_header(config.model_path)
    shape = memory_shape(header)
    plan = plan_cells(shape, settings)
    adapters = sum(check_adapter(file, header.architecture) for file in config.adapters)
    facts = EngineFacts(
        model=config.name,
        architecture=header.architecture,
        library=open_library(settings.libllama).name,
        vocab_size=header.array_lengths.get("tokenizer.ggml.tokens", 0),
        context_train=shape.context_train,
        num_slots=plan.num_slots,
        num_cells=plan.num_cells,
        cells_per_slot=plan.cells_per_slot,
        kv_mode="unified" if plan.is_unified else "per_stream",
        kv_bytes_per_cell=shape.kv_bytes_per_cell,
        state_bytes_per_slot=shape.state_bytes_per_slot * (1 + plan.num_snapshots),
        weights_bytes=header.tensor_bytes,
        num_threads=settings.num_threads or num_cores(),
        is_hybrid=shape.num_attention_layers < shape.num_layers,
        adapters=tuple(sorted(file.name for file in config.adapters)),
    )
    return Sized(facts, predicted_bytes(header, shape, plan, settings) + adapters)


async def sizes(configs: Sequence[WorkerConfig]) -> list[Sized]:
    """Ask a child about them. Raises ConfigError with the first refusal, EngineUnavailable."""
    found: list[Sized | LoadFailed] = []
    is_over = asyncio.Event()
    ends: list[ChildExit] = []

    def take(body: bytes) -> None:
        found.append(_answers.decode(body))
        if len(found) == len(configs):
            is_over.set()

    def end(how: ChildExit) -> None:
        ends.append(how)
        is_over.set()

    child = Child(["-m", "hitsend.serve.engine.sizing"], on_message=take, on_exit=end)
    try:
        await child.start()
        for config in configs:
            child.send(encode(config))
        await asyncio.wait_for(is_over.wait(), _TIMEOUT_S)
    except (ChildGone, OSError, TimeoutError) as error:
        raise EngineUnavailable(f"the process that reads models' headers failed: {error!r}") from error
    finally:
        await child.stop(grace_s=1.0)
    for config, answer in zip(configs, found, strict=False):
        if isinstance(answer, LoadFailed):
            raise ConfigError(f"{config.name}: {answer.message}")
    if len(found) < len(configs):
        raise EngineUnavailable(
            f"the process that reads models' headers ended ({ends[0].how}) {' '.join(ends[0].lines)}"
        )
    return [each for each in found if isinstance(each, Sized)]


def main(arguments: list[str]) -> None:
    """Answer until the edge hangs up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    die_with_parent()
    line = ParentLine(int(arguments[arguments.index("--fd") + 1]))
    while not line.is_closed:
        for body in line.receive(1.0):
            config = config_decoder.decode(body)
            try:
                line.send(encode(size(config)))
            except ConfigError as failure:
                line.send(encode(LoadFailed(str(failure))))


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: the library's own destructors may log into a Python that is already gone.
    os._exit(0)
