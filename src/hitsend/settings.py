"""Every setting, as one frozen typed tree.

Enters: values that `settings_source.py` has read. Leaves: one `Settings`, a section for each part. Always true: every
setting has its meaning beside it, from which `docs/settings.md` is written (`make docs`); sections are handed down,
nobody but `app` and `cli` sees the whole tree. Next: `settings_source.py`, which fills it.
"""

from typing import Annotated, Literal

from msgspec import Meta

from hitsend.settings_types import Count, Penalty, Positive, Price, Seconds, Section, Share
from hitsend.settings_upstreams import UpstreamPrices, UpstreamSettings, VllmSettings, WorkersAISettings

__all__ = ["Settings", "UpstreamPrices"]  # the second one stands elsewhere and belongs to the tree all the same


class ServerSettings(Section, frozen=True):
    """The HTTP edge."""

    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs at least one API key."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port (the ready line tells which)."""
    data_dir: str = ".hitsend"
    """Folder of the ledger, keys, records and models; made with mode 0700."""
    allowed_hosts: tuple[str, ...] = ()
    """Host header values served; empty means loopback names, the bound address and (with keys configured) any."""
    drain_s: Seconds = 10.0
    """How long running requests may go on after a stop signal."""
    workers: Annotated[int, Meta(ge=1, le=64)] = 1
    """Gateway processes. With more than one, a process above them owns the engine and counts the limits for all."""


class AccessSettings(Section, frozen=True):
    """Limits before any expensive work. Counts per request."""

    max_body_bytes: Positive = 4 * 1024 * 1024
    body_timeout_s: Seconds = 30.0
    """For the whole body to arrive."""
    max_messages: Positive = 1024
    max_content_parts: Positive = 256
    """Over all messages."""
    max_images: Count = 0
    max_tools: Count = 128
    max_tools_bytes: Positive = 256 * 1024
    """Names, descriptions and schemas of all tools, as JSON."""
    max_stop: Positive = 4
    """Stop strings."""
    max_stop_chars: Positive = 256
    max_n: Positive = 8
    """Choices."""
    max_prompts: Positive = 16
    """Prompts of one request to /v1/completions."""
    max_inputs: Positive = 256
    """Texts of one request to /v1/embeddings."""
    max_prompt_logprobs: Positive = 16_384
    """Prompt tokens, times what `prompt_logprobs` asks for of each."""
    max_tokens: Positive = 32768
    """Highest `max_tokens` that may be asked for."""
    max_json_depth: Positive = 64
    max_metadata: Positive = 16
    """Keys."""
    quota_url: str | None = None
    """Valkey or Redis where several gateways count limits: redis://, rediss://, valkey://; default: in process."""
    quota_prefix: str = "hitsend"
    """Begins the names of all keys there, in braces, so that a cluster keeps them in one slot."""
    quota_timeout_s: Seconds = 0.5
    """A call that isn't answered in this time counts as the server being away."""
    quota_lease_s: Seconds = 15.0
    """What a gateway that died held of the limits is released after so long."""
    quota_unreachable_rates: Literal["open", "closed"] = "open"
    """While it is away: rates and parallel limits are counted in this process (open), or refused with a 503."""
    quota_unreachable_budgets: Literal["open", "closed"] = "closed"
    """While it is away: requests under a budget are served and counted later (open), or refused with a 503."""


class OidcSettings(Section, frozen=True):
    """Callers known by tokens (JWT) of an issuer, beside keys. Needs the `jwt` extra; off while nothing is set."""

    issuer: str | None = None
    """The `iss` that tokens must have."""
    audience: str | None = None
    """The `aud` that tokens must have."""
    jwks_url: str | None = None
    """Where the issuer's public keys are: https, or http on this machine. Nothing in a token has a say in it."""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    """Signatures that count: RS, PS and ES with 256, 384 or 512, and EdDSA."""
    leeway_s: Annotated[int, Meta(ge=0, le=300)] = 30
    """How far clocks may be apart."""
    refresh_s: Seconds = 300.0
    """How often the keys are fetched again; an unknown key id may ask for them once a minute."""
    org_claim: str | None = None
    """The claim that names the organisation; dots lead into objects. A token without a claim that is set is refused."""
    app_claim: str | None = None
    """The claim that names the application."""
    user_claim: str | None = "sub"
    """The claim that names the user."""
    role_claim: str | None = None
    """The claim that holds admin, reader or caller, or a list with one of them; without it everybody is a caller."""


class ChatSettings(Section, frozen=True):
    """Template and tokenizer."""

    template: str | None = None
    """Path of a Jinja file to use instead of the checkpoint's own."""
    render_timeout_s: Seconds = 0.25
    max_prompt_bytes: Positive = 8 * 1024 * 1024
    tokenize_timeout_s: Seconds = 5.0


class SamplingPreset(Section, frozen=True):
    """Sampling defaults; None leaves the checkpoint's own value."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None


class ModelSettings(Section, frozen=True):
    """`[[models]]`: what a model whose name or architecture contains `match` (case-insensitive) gets as defaults."""

    match: str
    thinking: SamplingPreset = SamplingPreset()
    non_thinking: SamplingPreset = SamplingPreset()
    thinking_by_default: bool = False
    tool_format: Literal["hermes", "xml", "llama3", "mistral", "pythonic", "none"] | None = None
    """How it writes calls; without it, what its template tells. `none`: calls stay text."""
    reasoning_format: Literal["think", "brackets", "seed", "none"] | None = None
    """How it marks thoughts; without it, what its template tells. `none`: thoughts stay text."""


class EngineSettings(Section, frozen=True):
    """The embedded engine."""

    model: str = "smollm2-135m"
    """A GGUF path, a name from the models folder, `smollm2-135m` (bundled), hf:owner/repo[:file], or `none`."""
    models_dir: str | None = None
    """Folder of GGUF files; default DATA_DIR/models."""
    libllama: str | None = None
    """Path of a libllama shared library; default is the one in the xllamacpp package."""
    embedding_model: str | None = None
    """What `/v1/embeddings` runs: a GGUF path or name, `all-minilm-l6-v2`, or hf:owner/repo[:file]; none by default."""
    embedding_context: Count = 0
    """Tokens per text to embed; 0: what the model was trained on, at most 8192."""
    alias: str | None = None
    """The name under which the model is served; default is its file's stem."""
    num_threads: Count = 0
    """0: as many as cores."""
    num_slots: Annotated[int, Meta(ge=1, le=256)] = 32
    """Sequences that can run at once."""
    context: Count = 0
    """Tokens per sequence; 0: as many as the KV budget allows, at most what the model was trained on."""
    kv_budget_bytes: Count = 2 * 1024 * 1024 * 1024
    """Memory for the KV cache."""
    memory_budget_bytes: Positive | None = None
    """Weights, adapters, cells and state of all embedded models, predicted from their files; default: no bound."""
    kv_mode: Literal["auto", "per_stream", "unified"] = "auto"
    """per_stream: each sequence its own cells (faster); unified: one pool; auto: unified where `context` needs it."""
    step_tokens: Positive = 512
    """Token budget of one step: decodes first, then prefill chunks."""
    tpot_target_s: Seconds = 0.1
    """Prompts are computed in chunks that keep the mean time per output token of others under this, where they can."""
    ttft_target_s: Seconds = 2.0
    """A prompt of at most 1024 tokens that has waited for half of this goes first."""
    reserve_tokens: Count = 64
    """Cells beyond its prompt that a request must find free to be admitted."""
    max_waiting: Positive = 256
    """Requests in the waiting queue; one more, or one of whoever has the most there, is `server_overloaded`."""
    aging_s: Seconds = 10.0
    """A tenant that waits and gets nothing goes up one tier each time so many seconds pass."""
    wait_timeout_s: Seconds = 60.0
    """A request that waited so long is refused with `server_overloaded`."""
    start_timeout_s: Seconds = 120.0
    """For the model to be loaded."""
    progress_timeout_s: Seconds = 8.0
    """/healthz turns red after this many seconds without progress."""
    check_every_step: bool = False
    """Prove after every step that no cell was lost (always done when idle)."""


class AdapterSettings(Section, frozen=True):
    """`[[adapters]]`: a LoRA adapter (GGUF) over an embedded model, served as a model of its own."""

    name: str
    """The name under which it is served."""
    path: str
    """Its GGUF file, as llama.cpp's `convert_lora_to_gguf` makes it of `adapter_model.safetensors`."""
    model: str | None = None
    """The embedded model that it changes, by the name under which that is served; default: `engine.model`."""
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    """How much of the change; 0: none."""


class PooledSettings(Section, frozen=True, tag_field="kind", tag="embedded"):
    """`[[engines]]` with `kind = "embedded"`: one more model of this machine, loaded when it is asked for.

    What isn't set is as in `[engine]`, whose model is always loaded. Not together with `server.workers` above 1.
    """

    name: str
    """How records, rows and metrics call it."""
    model: str
    """As `engine.model`."""
    aliases: tuple[str, ...] = ()
    """The names under which it is served; default is its file's stem."""
    num_slots: Annotated[int, Meta(ge=1, le=256)] | None = None
    context: Count | None = None
    kv_budget_bytes: Count | None = None
    num_threads: Count | None = None
    max_waiting: Positive | None = None
    max_concurrent: Positive = 256
    """Requests that run or wait there at once; one more is refused with `server_overloaded`."""
    idle_unload_s: Annotated[float, Meta(ge=0)] = 300.0
    """After so long without a request it is unloaded. 0: only when another model needs its room."""
    is_loaded_at_start: bool = False


class StreamSettings(Section, frozen=True):
    """Server-sent events."""

    ping_s: Seconds = 10.0
    """Silence after which a comment line is sent."""
    stall_s: Seconds = 30.0
    """A client that doesn't read for so long is cut off."""
    pause_tokens: Positive = 256
    """Tokens waiting for a slow client after which its generation is paused."""
    request_timeout_s: Seconds = 600.0
    """Longest life of a request."""


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
    """SQLAlchemy URL; default sqlite+aiosqlite in the data folder. Or postgresql+asyncpg://user:password@host/database."""
    hold_lease_s: Seconds = 30.0
    """A hold whose server died is released after so long."""
    connect_timeout_s: Seconds = 5.0
    """PostgreSQL: for a connection to be made, or to become free."""
    command_timeout_s: Seconds = 5.0
    """PostgreSQL: for one statement. A transaction may take this and `connect_timeout_s` together."""
    lock_timeout_s: Seconds = 3.0
    """PostgreSQL: for a row that another gateway writes."""
    pool_size: Positive = 5
    """PostgreSQL: connections kept open; as many again while they are needed."""
    idempotency_s: Seconds = 86_400.0
    """How long an answer is kept for its Idempotency-Key."""
    idempotency_answer_bytes: Positive = 4 * 1024 * 1024
    """Largest answer that is kept; the key of a larger one is remembered, and refused when it comes again."""
    idempotency_total_bytes: Positive = 256 * 1024 * 1024
    """All kept answers together, compressed."""


class RecordSettings(Section, frozen=True):
    """The flight record."""

    text: bool = False
    """Whether prompt and output text (and token ids) are kept."""
    ring: Positive = 1000
    """Records kept in memory."""
    retention_days: Positive = 7
    max_stored: Positive = 100_000
    """Records kept in the data folder."""
    max_steps: Positive = 512
    """Step events kept per request; later ones are summed into the segments only."""


class SloSettings(Section, frozen=True):
    """What a request is promised, for goodput: the share of requests that met all of it. Changes nothing else."""

    ttft_s: Seconds | None = 2.0
    """To the first token."""
    tpot_s: Seconds | None = 0.1
    """Per token after the first, on average."""
    e2e_s: Seconds | None = None
    """From arrival to the last byte."""


class ResponsesSettings(Section, frozen=True):
    """Answers of /v1/responses that clients ask to be stored, with the text of their conversation."""

    store: bool = True
    """Whether `store: true` is honoured; false: nothing is ever stored, and no response has a successor."""
    retention_days: Positive = 30
    max_stored: Positive = 1000
    """Per key; the oldest make room."""


class LogSettings(Section, frozen=True):
    """Logs on stderr."""

    format: Literal["pretty", "json"] = "pretty"
    level: Literal["debug", "info", "warning", "error"] = "info"
    requests: bool = True
    """One line per request: its id, caller, model, end, times, tokens and cost; never its text."""


class TracingSettings(Section, frozen=True):
    """OpenTelemetry traces. Needs the `otel` extra; off while no address is set."""

    otlp_url: str | None = None
    """Where a collector takes OTLP over HTTP: http://127.0.0.1:4318/v1/traces."""
    service_name: str = "hitsend"
    sample_share: Share = 1.0
    """Of requests whose client doesn't say whether they are to be traced."""
    timeout_s: Annotated[int, Meta(ge=1, le=60)] = 5
    """For one batch to be taken."""
    max_spans: Annotated[int, Meta(ge=512)] = 4096
    """Spans that wait to be sent; more are dropped."""


class Settings(Section, frozen=True):
    """The whole tree."""

    server: ServerSettings = ServerSettings()
    access: AccessSettings = AccessSettings()
    oidc: OidcSettings = OidcSettings()
    chat: ChatSettings = ChatSettings()
    engine: EngineSettings = EngineSettings()
    stream: StreamSettings = StreamSettings()
    usage: UsageSettings = UsageSettings()
    record: RecordSettings = RecordSettings()
    slo: SloSettings = SloSettings()
    responses: ResponsesSettings = ResponsesSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    models: tuple[ModelSettings, ...] = ()
    engines: tuple[PooledSettings | UpstreamSettings | VllmSettings | WorkersAISettings, ...] = ()
    adapters: tuple[AdapterSettings, ...] = ()
    prices: tuple[PriceSettings, ...] = ()
