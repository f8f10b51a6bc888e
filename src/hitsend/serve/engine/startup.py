"""The first words between the edge and the engine's child: what to load, and what went wrong when it can't be.

Enters: settings. Leaves: two structs and their codecs. Always true: the child is sent exactly one `WorkerConfig`
before any command and answers with `Ready` (see `loop/messages.py`) or one `LoadFailed`. Next: `worker.py`.
"""

import msgspec

from hitsend.serve.loop.messages import Command, Report
from hitsend.settings import AdapterSettings, EngineSettings


class WorkerConfig(msgspec.Struct, frozen=True):
    """What the child loads. `name` is the model's served name, `model_path` a GGUF file."""

    name: str
    model_path: str
    settings: EngineSettings
    adapters: tuple[AdapterSettings, ...] = ()


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """Loading can't work with these settings; `message` is for the operator and may name paths."""

    message: str


encode = msgspec.msgpack.Encoder().encode
config_decoder = msgspec.msgpack.Decoder(WorkerConfig)
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report | LoadFailed] = msgspec.msgpack.Decoder(Report | LoadFailed)
