"""Every setting, as one frozen typed tree, and where each value came from.

Enters: built-in defaults, `hitsend.toml`, `HITSEND__SECTION__FIELD` environment variables and flags, later ones winning.
Leaves: one `Settings`. Always true: an unknown or ill-typed setting is a `ConfigError` that names it and its source;
`os.environ` is read in this file and nowhere else; sections are handed down, nobody but `app` and `cli` sees the whole tree.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused."""


class ServerSettings(Section, frozen=True):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    data_dir: str = ".hitsend"
    allowed_hosts: tuple[str, ...] = ()
    """Host header values served; empty means loopback names, the bound address and (with keys configured) any."""
    drain_s: Seconds = 10.0


class AccessSettings(Section, frozen=True):
    """Limits before any expensive work. Counts per request."""

    max_body_bytes: Positive = 4 * 1024 * 1024
    body_timeout_s: Seconds = 30.0
    max_messages: Positive = 1024
    max_content_parts: Positive = 256
    max_images: Count = 0
    max_tools: Count = 128
    max_stop: Positive = 4
    max_stop_chars: Positive = 256
    max_n: Positive = 8
    max_tokens: Positive = 32768
    max_json_depth: Positive = 64
    max_metadata: Positive = 16


class ChatSettings(Section, frozen=True):
    """Template and tokenizer."""

    template: str | None = None
    """Path of a Jinja file to use instead of the checkpoint's own."""
    render_timeout_s: Seconds = 0.25
    max_prompt_bytes: Positive = 8 * 1024 * 1024
    tokenize_timeout_s: Seconds = 5.0


class SamplingPreset(Section, frozen=True):
    """Sampling defaults; None leaves the checkpoint's own value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class ModelSettings(Section, frozen=True):
    """`[[models]]`: what a model whose name or architecture contains `match` (case-insensitive) gets as defaults."""

    match: str
    thinking: SamplingPreset = SamplingPreset()
    non_thinking: SamplingPreset = SamplingPreset()
    thinking_by_default: bool = False


class EngineSettings(Section, frozen=True):
    """The embedded engine."""

    model: str = "smollm2-135m"
    """A GGUF path, a name from the models folder, `smollm2-135m` (bundled), or hf:owner/repo[:file]."""
    models_dir: str | None = None
    """Folder of GGUF files; default DATA_DIR/models."""
    libllama: str | None = None
    """Path of a libllama shared library; default is the one in the xllamacpp package."""
    alias: str | None = None
    """The name under which the model is served; default is its file's stem."""
    num_threads: Count = 0
    """0: as many as cores."""
    num_slots: Annotated[int, Meta(ge=1, le=256)] = 32
    context: Count = 0
    """Tokens per sequence; 0: as many as the KV budget allows, at most what the model was trained on."""
    kv_budget_bytes: Count = 2 * 1024 * 1024 * 1024
    kv_mode: Literal["per_stream", "unified"] = "per_stream"
    step_tokens: Positive = 512
    """Token budget of one step: decodes first, then prefill chunks."""
    reserve_tokens: Count = 64
    """Cells beyond its prompt that a request must find free to be admitted."""
    max_waiting: Positive = 256
    wait_timeout_s: Seconds = 60.0
    start_timeout_s: Seconds = 120.0
    progress_timeout_s: Seconds = 8.0
    """/healthz turns red after this many seconds without progress."""
    check_every_step: bool = False


class StreamSettings(Section, frozen=True):
    """Server-sent events."""

    ping_s: Seconds = 10.0
    stall_s: Seconds = 30.0
    """A client that doesn't read for so long is cut off."""
    pause_tokens: Positive = 256
    """Tokens waiting for a slow client after which its generation is paused."""
    request_timeout_s: Seconds = 600.0


class PriceSettings(Section, frozen=True):
    """`[[prices]]`: USD per million tokens for one served model (`model` may be `*`)."""

    model: str
    input: Price
    output: Price
    cached_input: Price | None = None
    id: str = "settings"


class UsageSettings(Section, frozen=True):
    """Ledger and holds."""

    url: str | None = None
    """SQLAlchemy URL; default sqlite+aiosqlite in the data folder."""
    hold_lease_s: Seconds = 30.0


class RecordSettings(Section, frozen=True):
    """The flight record."""

    text: bool = False
    """Whether prompt and output text (and token ids) are kept."""
    ring: Positive = 1000
    retention_days: Positive = 7
    max_stored: Positive = 100_000
    max_steps: Positive = 512
    """Step events kept per request; later ones are summed into the segments only."""


class LogSettings(Section, frozen=True):
    """Logs on stderr."""

    format: Literal["pretty", "json"] = "pretty"
    level: Literal["debug", "info", "warning", "error"] = "info"


class Settings(Section, frozen=True):
    """The whole tree."""

    server: ServerSettings = ServerSettings()
    access: AccessSettings = AccessSettings()
    chat: ChatSettings = ChatSettings()
    engine: EngineSettings = EngineSettings()
    stream: StreamSettings = StreamSettings()
    usage: UsageSettings = UsageSettings()
    record: RecordSettings = RecordSettings()
    log: LogSettings = LogSettings()
    models: tuple[ModelSettings, ...] = ()
    prices: tuple[PriceSettings, ...] = ()
