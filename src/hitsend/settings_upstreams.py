"""`[[engines]]` that are servers elsewhere: what all kinds have, and what each has beside it.

Enters: tables of the settings file. Leaves: one frozen struct per engine, told apart by its `kind`. Always true: where
an engine is, and with which key it is asked, stands here and nowhere else: nothing of a request can change it. Next:
`settings.py`.
"""

from typing import Annotated, Literal

from msgspec import Meta

from hitsend.settings_engines import Positive, Price, Seconds, Section, Share

Server = Literal["generic", "openai", "openrouter", "ollama", "llama_server", "sglang", "tgi", "hitsend"]


class UpstreamPrices(Section, frozen=True):
    """What an upstream's tokens cost, in USD per million; `[[prices]]` for an alias goes before it."""

    input: Price
    output: Price
    cached_input: Price | None = None
    batch_discount: Share = 0.0
    """As in `[[prices]]`."""


class UpstreamBase(Section, frozen=True):
    """`[[engines]]` of the kinds `openai`, `vllm` and `workers_ai`: what they all have.

    `models` is a table of what it serves: name here = "name there". Clients can change none of this.
    """

    name: str
    """How records, rows and metrics call it."""
    base_url: str = ""
    """Of kind openai up to and including `/v1`. Redirects are not followed, proxies of the environment not used."""
    models: dict[str, str] = {}  # noqa: RUF012  # msgspec gives each its own
    """What it serves: name here = "name there"."""
    embedding_models: dict[str, str] = {}  # noqa: RUF012  # same
    """What it embeds with, in the same form; billed by its own usage."""
    base_urls: tuple[str, ...] = ()
    """Several servers with the same models in place of `base_url`: each request goes to one of them."""
    draining: tuple[str, ...] = ()
    """Those of `base_urls` that get no new requests."""
    api_key_env: str | None = None
    """The environment variable that holds the upstream's key."""
    api_key_file: str | None = None
    """The file that holds it, in place of `api_key_env`."""
    prices: UpstreamPrices | None = None
    context: Positive = 131_072
    """Tokens of prompt and answer together, as `/v1/models` tells it; the upstream is the judge of prompts."""
    max_tokens: Positive = 4096
    """Asked for where the client set no max_tokens: the hold needs a bound, and some stop at 256 without one."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None
    """Default: as its kind has it."""
    passes: tuple[str, ...] = ()
    """Fields beyond its kind's that it takes by the same name (`top_k`, `min_p`, `chat_template_kwargs`, …)."""
    renames: dict[str, str] = {}  # noqa: RUF012  # msgspec gives each its own
    """Fields that it takes by another name: name here = "name there"; a dot leads into an object."""
    lacks: tuple[str, ...] = ()
    """Fields that it doesn't take although its kind does; `tools`, `grammar`, `logprobs`: all that belong there;
    `stream_options`: usage isn't asked for, and counted here where it doesn't come by itself; `reasoning_content`:
    earlier thoughts of a conversation aren't sent along."""
    unsupported: Literal["refuse", "ignore"] = "refuse"
    """A field that it doesn't take is a 400 that names it, or left out, with a warning in answer and record."""
    counts_prompts: Literal["bytes", "embedded", "upstream", "tokenizer"] | None = None
    """What a prompt reserves: a bound from its bytes, or a tokenizer's count. Default: by `tokenizer` where it is set,
    or `serve_model` is a folder with one, else vllm, llama_server and hitsend their own, others bytes."""
    tokenizer: str | None = None
    """The tokenizer.json of the checkpoint that it serves, or the folder with it, tokenizer_config.json and perhaps
    chat_template.jinja: prompts are counted here by it. Needs the package tokenizers."""
    max_concurrent: Positive = 256
    """Requests that run there at once, from each gateway process; one more is refused with `server_overloaded`."""
    connect_timeout_s: Seconds = 5.0
    stall_timeout_s: Seconds = 120.0
    """Longest silence, before the first byte as well as between two."""
    retry_share: Share = 0.1
    """Requests may be repeated before their first byte, once each, at most this share of all. 0: never."""
    hedge_after_s: Annotated[float, Meta(ge=0)] = 0.0
    """Silence before an answer's first word after which another of `base_urls` is asked the same too, as far as
    `retry_share` goes; who speaks first answers, the other is left, its cost the operator's. 0: never."""
    breaker_failures: Positive = 5
    """Failures in a row that open the circuit breaker."""
    breaker_share: Share = 0.5
    """Failures among the last 50 requests that open it too."""
    breaker_open_s: Seconds = 2.0
    """How long it refuses before one request may try again; doubles up to 60 s while that fails."""
    metrics_poll_s: Annotated[float, Meta(ge=0)] = 1.0
    """How often its /metrics is read, where its kind has one (vllm, sglang, llama_server). 0: never."""
    max_waiting: Positive = 128
    """Requests in a server's own queue, by its /metrics, from which on it gets no more."""
    max_kv_use: Share = 0.98
    """Share of a server's KV cache in use from which on it gets no more while requests wait there."""


class UpstreamSettings(UpstreamBase, frozen=True, tag_field="kind", tag="openai"):
    """`[[engines]]` with `kind = "openai"`, or without `kind`: a server elsewhere that speaks OpenAI's chat API."""

    server: Server = "generic"
    """What it is, which tells what it takes: generic takes OpenAI's own fields."""


class VllmSettings(UpstreamBase, frozen=True, tag_field="kind", tag="vllm"):
    """`[[engines]]` with `kind = "vllm"`: one `vllm serve`, or several (`base_urls`)."""

    sends_priority: bool = False
    """Send each request's tier as `priority`; only where vLLM runs with `--scheduling-policy priority`."""
    salts_cache: bool = True
    """Send a `cache_salt` of each tenant's own: nobody can tell by the time what others have asked."""
    serve_model: str | None = None
    """Start `vllm serve` with this model on this machine, at `base_url`, and again when it dies."""
    serve_command: tuple[str, ...] = ("vllm", "serve")
    """What starts it; the model, `--host`, `--port` and `--served-model-name` are put behind."""
    serve_arguments: tuple[str, ...] = ()
    """What comes behind those (`--max-model-len`, …)."""
    serve_start_timeout_s: Seconds = 900.0
    """For it to answer `/health`."""


class WorkersAISettings(UpstreamBase, frozen=True, tag_field="kind", tag="workers_ai"):
    """`[[engines]]` with `kind = "workers_ai"`: Cloudflare's models, billed in neurons.

    Without `prices` the built-in list of neurons counts, by the names at the upstream (`@cf/…`).
    """

    account_id: str | None = None
    """Makes the address, where `base_url` isn't set: https://api.cloudflare.com/client/v4/accounts/ID/ai."""
    route: Literal["openai", "native"] = "openai"
    """`/v1/chat/completions`, or `/run/@cf/…` with its envelope."""
    plan: Literal["free", "paid"] = "free"
    """free: a request that may go beyond the day's 10,000 neurons is refused, as are models of the paid plan."""
    thinking_by_default: bool = False
    """Whether models that can think do so when a request doesn't say. Thoughts are billed as output."""
    reject_if_busy: bool = False
    """Be refused at once while there is no capacity, in place of waiting in Cloudflare's queue."""
