"""Every setting, as one frozen typed tree.

Enters: values that `settings_source.py` has read. Leaves: one `Settings`, a section for each part. Always true: every
setting has its meaning beside it, from which `docs/settings.md` is written (`make docs`); sections are handed down,
nobody but `app` and `cli` sees the whole tree. Next: `settings_source.py`, which fills it.
"""

from typing import Annotated, Literal

from msgspec import Meta

from hitsend.settings_engines import (
    AdapterSettings,
    Count,
    EngineSettings,
    ModelSettings,
    PooledSettings,
    Positive,
    Price,
    SamplingPreset,
    Seconds,
    Section,
    Share,
)
from hitsend.settings_routes import CanarySettings, CascadeSettings, RouteSettings
from hitsend.settings_upstreams import UpstreamPrices, UpstreamSettings, VllmSettings, WorkersAISettings

__all__ = [
    "AccessSettings",
    "AdapterSettings",
    "BatchSettings",
    "CanarySettings",
    "CascadeSettings",
    "ChatSettings",
    "EngineSettings",
    "LogSettings",
    "ModelSettings",
    "OidcSettings",
    "PooledSettings",
    "PriceSettings",
    "RecordSettings",
    "ResponsesSettings",
    "RouteSettings",
    "SamplingPreset",
    "Section",
    "ServerSettings",
    "Settings",
    "SloSettings",
    "StreamSettings",
    "TracingSettings",
    "UpstreamPrices",
    "UpstreamSettings",
    "UsageSettings",
    "VllmSettings",
    "WorkersAISettings",
]


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
    max_connections: Positive = 1000
    """Open at once, in each gateway process; each takes a file descriptor. Beyond it only health checks, metrics, state
    and administration are served, and what comes beyond those is closed with a 503."""
    max_connections_per_address: Positive | None = None
    """Of these, from one address. Leave it unset behind a proxy, whose connections all come from one."""
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
    max_stop_chars: Positive = 256
    max_n: Positive = 8
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


class StreamSettings(Section, frozen=True):
    """Server-sent events."""

    ping_s: Seconds = 10.0
    """Silence after which a comment line is sent, from the request's arrival on."""
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
    batch_discount: Share = 0.0
    """What lines of batches cost less, as a share: 0.5 is half the price."""


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


class BatchSettings(Section, frozen=True):
    """Files and batches: many requests as one file, worked off while nobody else needs the engine."""

    max_file_bytes: Positive = 100 * 1024 * 1024
    """Of one upload. Every started MiB of it may take `access.body_timeout_s`."""
    max_lines: Positive = 100_000
    """Of one batch's file. A line may have `access.max_body_bytes`."""
    stored_bytes: Positive = 1024 * 1024 * 1024
    """Of all files of one key together, output files included; further uploads are refused."""
    max_open: Positive = 20
    """Batches of one key that aren't over."""
    retention_days: Annotated[int, Meta(ge=2)] = 30
    """Files, and batches that are over, are deleted after so long."""
    slots_share: Share = 0.5
    """Of each engine's slots, the most that lines may have, at least one; they begin only while nobody waits."""


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
    batches: BatchSettings = BatchSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    models: tuple[ModelSettings, ...] = ()
    engines: tuple[PooledSettings | UpstreamSettings | VllmSettings | WorkersAISettings, ...] = ()
    routes: tuple[RouteSettings, ...] = ()
    adapters: tuple[AdapterSettings, ...] = ()
    prices: tuple[PriceSettings, ...] = ()
