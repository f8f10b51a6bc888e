"""What a model would be and take, found out without loading it: a child that reads its header and rehearses its start.

    python -m hitsend.serve.engine.sizing --fd N

Enters: one `WorkerConfig` per model and process. Leaves: `Sized` or `LoadFailed`. Always true: no file is parsed
in the edge's process; the facts are those that the engine's child will find when it loads the model, but for what only
the library can say (the metadata as text). Next: `rehearsal.py`.
"""

import asyncio
import importlib
import os
import resource
import sys
from collections.abc import Sequence

import msgspec

from hitsend.core.errors import ConfigError, EngineUnavailable
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.serve.engine.blas import check_blas
from hitsend.serve.engine.layouts import AS_SHIPPED
from hitsend.serve.engine.libllama import die_with_parent, open_library
from hitsend.serve.engine.loading import judged, num_cores
from hitsend.serve.engine.offsets import LAYOUT_KEY, offsets_bytes
from hitsend.serve.engine.rehearsal import Memory, predicted
from hitsend.serve.engine.speculating import check_head
from hitsend.serve.engine.startup import LoadFailed, WorkerConfig, config_decoder, encode
from hitsend.serve.engine.unmet import Known, unmet
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.parent import ParentLine

_TIMEOUT_S = 60.0


class Sized(msgspec.Struct, frozen=True, tag="sized"):
    """What it would be, and what its process would take."""

    facts: EngineFacts
    memory: Memory

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.memory.total


_answers = msgspec.msgpack.Decoder(Sized | LoadFailed)


def size(config: WorkerConfig) -> Sized:
    """Read the headers and divide the budget. Raises ConfigError."""
    settings = config.settings
    header, shape, plan = judged(config)
    library = open_library(settings.libllama)
    check_blas(settings.blas, library)
    check_head(header, library, settings)
    offsets = offsets_bytes(config.model_path, header)
    facts = EngineFacts(
        model=config.name,
        architecture=header.architecture,
        library=library.name,
        vocab_size=header.array_lengths.get("tokenizer.ggml.tokens", 0),
        context_train=shape.context_train,
        num_slots=plan.num_slots,
        num_cells=plan.num_cells,
        cells_per_slot=plan.cells_per_slot,
        kv_mode="unified" if plan.is_unified else "per_stream",
        kv_bytes_per_cell=shape.kv_bytes_per_cell,
        state_bytes_per_slot=shape.state_bytes_per_slot * (1 + plan.num_snapshots),
        weights_bytes=header.tensor_bytes + offsets,
        num_threads=settings.num_threads or num_cores(),
        is_hybrid=shape.num_attention_layers < shape.num_layers,
        adapters=tuple(sorted(file.name for file in config.adapters)),
        layout=str(header.metadata.get(LAYOUT_KEY, AS_SHIPPED)),
        kv_type=settings.kv_type,
        unmet=unmet(settings, Known(header, shape, plan, num_cores())),
    )
    return Sized(facts, predicted(config, plan, library))


async def sizes(configs: Sequence[WorkerConfig]) -> list[Sized]:
    """Ask children about them, one each, because each measures itself. Raises ConfigError, EngineUnavailable."""
    return list(await asyncio.gather(*(_sized(config) for config in configs)))


async def _sized(config: WorkerConfig) -> Sized:
    found: list[Sized | LoadFailed] = []
    is_over = asyncio.Event()
    ends: list[ChildExit] = []

    def take(body: bytes) -> None:
        found.append(_answers.decode(body))
        is_over.set()

    def end(how: ChildExit) -> None:
        ends.append(how)
        is_over.set()

    child = Child(["-m", "hitsend.serve.engine.sizing"], on_message=take, on_exit=end)
    try:
        await child.start()
        child.send(encode(config))
        async with asyncio.timeout(_TIMEOUT_S):
            await is_over.wait()
    except (ChildGone, OSError, TimeoutError) as error:
        raise EngineUnavailable(f"the process that reads models' headers failed: {error!r}") from error
    finally:
        await child.stop(grace_s=1.0)
    for answer in found:
        if isinstance(answer, LoadFailed):
            raise ConfigError(f"{config.name}: {answer.message}")
        return answer
    raise EngineUnavailable(f"the process that reads models' headers ended ({ends[0].how}) {' '.join(ends[0].lines)}")


def main(arguments: list[str]) -> None:
    """Answer until the edge hangs up."""
    importlib.import_module("hitsend.serve.engine.worker")  # what an engine's process imports is part of what it takes
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
