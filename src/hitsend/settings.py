"""Every setting, as one frozen typed tree, and where each value came from.

Enters: built-in defaults, `hitsend.toml`, `HITSEND__SECTION__FIELD` environment variables and flags; later ones win.
Leaves: one `Settings`, and the source of each value. Always true: an unknown or ill-typed setting is a `ConfigError`
that names it, its source and what would be right; `os.environ` is read in this file and nowhere else; sections are
handed down, nobody but `app` and `cli` sees the whole tree. `docs/settings.md` is written from it (`make docs`).
Next: `serve/app.py`, which builds everything from it.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from hitsend.core.errors import ConfigError

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused."""


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
    """A GGUF path, a name from the models folder, `smollm2-135m` (bundled), or hf:owner/repo[:file]."""
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
    kv_mode: Literal["per_stream", "unified"] = "per_stream"
    """per_stream: each sequence its own cells (faster on CPUs); unified: one pool of cells."""
    step_tokens: Positive = 512
    """Token budget of one step: decodes first, then prefill chunks."""
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
    """SQLAlchemy URL; default sqlite+aiosqlite in the data folder."""
    hold_lease_s: Seconds = 30.0
    """A hold whose server died is released after so long."""


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
    responses: ResponsesSettings = ResponsesSettings()
    log: LogSettings = LogSettings()
    models: tuple[ModelSettings, ...] = ()
    prices: tuple[PriceSettings, ...] = ()


class Loaded(msgspec.Struct, frozen=True):
    """The settings, and where each one that isn't a default came from (key -> source, in words)."""

    settings: Settings
    sources: dict[str, str] = {}


def fields(section: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every setting of the tree as (key, type, default), in order. `[[models]]` and `[[prices]]` count as one each."""
    for field in msgspec.structs.fields(section):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from fields(field.type, f"{key}.")
        else:
            yield key, field.type, field.default


def load(
    config: Path | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Loaded:
    """Fold into one tree: defaults < `config` (TOML) < `env` < `flags` (key -> text). Raises ConfigError."""
    types = {key: kind for key, kind, _ in fields()}
    tree: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for given in _all(config, env or {}, flags or {}):
        key = given.key
        if key not in types:
            raise ConfigError(f"{given.source}: there is no setting {key}{_nearest(key, types)}")
        *section, name = key.split(".")
        (tree.setdefault(section[0], {}) if section else tree)[name] = _typed(given, types[key])
        sources[key] = given.source
    return Loaded(msgspec.convert(tree, Settings, from_attributes=True), sources)


def load_process(config: Path | None = None, flags: Mapping[str, str] | None = None) -> Loaded:
    """`load` with this process's environment; without `config`, the working folder's `hitsend.toml` if there is one."""
    if config is None and Path("hitsend.toml").is_file():
        config = Path("hitsend.toml")
    return load(config, os.environ, flags)


def shown(key: str, value: Any) -> Any:
    """A value as it may be printed: passwords inside URLs are masked."""
    if key == "usage.url" and isinstance(value, str):
        return re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", value)
    return msgspec.to_builtins(value)


def described(kind: Any) -> str:
    """A setting's type in words: `integer, at least 1`, `one of "pretty", "json"`, `text or nothing`."""
    if get_origin(kind) in (UnionType, Union):
        return f"{described(get_args(kind)[0])} or nothing"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(kind))
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)
        words = (
            f"{described(base)} above {meta.gt}" if meta.gt is not None else f"{described(base)}, at least {meta.ge}"
        )
        return words if meta.le is None else f"{words} and at most {meta.le}"
    if get_origin(kind) is tuple:
        return "list of texts" if get_args(kind)[0] is str else "array of tables"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}[kind]


class _Given(msgspec.Struct, frozen=True):
    """One setting from one source; `is_text` when it may have to be read as a number, a truth value, a list or JSON."""

    key: str
    value: Any
    source: str
    is_text: bool = True


def _all(config: Path | None, env: Mapping[str, str], flags: Mapping[str, str]) -> Iterator[_Given]:
    if config is not None:
        yield from _from_file(config)
    for name in sorted(env):
        if name.startswith("HITSEND__"):
            yield _Given(name.removeprefix("HITSEND__").replace("__", ".").lower(), env[name], f"environment {name}")
    for key, text in flags.items():
        yield _Given(key, text, f"flag {key}")


def _from_file(path: Path) -> Iterator[_Given]:
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML ({error})") from error
    for name, value in tree.items():
        inner = {f"{name}.{field}": held for field, held in value.items()} if isinstance(value, dict) else {name: value}
        for key, held in inner.items():
            yield _Given(key, held, str(path), is_text=False)


def _typed(given: _Given, kind: Any) -> Any:
    """The value as `kind`, or a ConfigError that says what would be right."""
    try:
        value = _from_text(given.value, kind) if given.is_text else given.value
        typed = msgspec.convert(value, kind, strict=not given.is_text)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise _wrong(given, kind, str(error)) from error
    if isinstance(typed, float) and not math.isfinite(typed):
        raise _wrong(given, kind, "not finite")
    return typed


def _wrong(given: _Given, kind: Any, detail: str) -> ConfigError:
    right = described(kind)
    if right == "array of tables":
        right = f"{right}; {detail.replace('`', '').replace(' - at $', ', at ')}"
    return ConfigError(f"{given.source}: {given.key} can't be {shown(given.key, given.value)!r}, it must be {right}")


def _from_text(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    if kind == str | None:
        return text or None
    if get_origin(kind) is not tuple:
        return text
    if get_args(kind)[0] is str and not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    return msgspec.json.decode(text)


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {near[0]}?" if near else " (`hitsend config show` lists them all)"
