"""What each kind of upstream takes, gives and says when it fails: data, one `Profile` per kind and known server.

Enters: a kind, or a server's name. Leaves: its `Profile`. Always true: what sets upstreams apart stands here and in the
settings, never in a branch of the code that asks them; where a fact comes from, and its day, stands beside it. Next:
`terms.py`, which puts a profile and an engine's settings together.
"""

from typing import Any, Literal

import msgspec

from hitsend.serve.engine.breaker import Outcome

OPENAI_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "n",
        "stop",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "response_format",
    }
)
"""Fields of OpenAI's own that a request may have, besides model, messages, stream and the token limit."""

THOUGHTS = "reasoning_content"
"""In messages of the assistant: what it thought. Some take it by another name, and pass over this one in silence."""

STRUCTURED = ("structured_outputs.regex", "structured_outputs.choice", "structured_outputs.lark")

GROUPS = {
    "grammar": ("response_format", *STRUCTURED),
    "structured_outputs": STRUCTURED,
    "tools": ("tools", "tool_choice", "parallel_tool_calls"),
    "logprobs": ("logprobs", "top_logprobs"),
}
"""Names in the settings that stand for several fields."""

Wait = Literal["utc_midnight"]


class Reaction(msgspec.Struct, frozen=True):
    """What an error code there means here: hitsend's own code, and what becomes of the request and of the breaker.

    `closes`: nothing more is asked until then.
    """

    code: str
    why: str
    may_repeat: bool = False
    outcome: Outcome = "left"
    closes: Wait | None = None


class Profile(msgspec.Struct, frozen=True):
    """One kind of upstream. `source`: where this is known from, and when it was read.

    `fields`: what it takes beyond OpenAI's or by another name, our name → its own; dots lead into objects. `lacks`:
    OpenAI's own that it doesn't take. Paths that begin with a slash count from the address without `/v1`; without
    `completions_path` it gets messages only. `count_path` takes a chat and gives its tokens under `count_key`.
    `metrics`: what a gauge of its `/metrics` is called, newest name first. `adds`: what every body has besides.
    `thinking_off`: what says that a model which thinks by itself shall not, for models whose name has one of
    `thinking_models` in it; `effort_thinks`: any `reasoning_effort` but none turns thinking on. `reads_specials`: it
    renders messages as they come, by the checkpoint's own template, and special spellings are special tokens whoever
    typed them; `prompts_as_here`: it makes prompts as hitsend does. `names_tool`: it understands a `tool_choice` that
    names a function; `calls_by_schema`: it makes sure of a call only as JSON by a schema. `cuts_vectors`: it knows
    `dimensions`; else they are cut here. `bills_choices`: its usage has all choices of an answer in it. `skips_null`:
    it sends events of null. `is_lenient`: frames and answers in older shapes are read too. `context_words`: in an
    error, they mean that the prompt was too long; `priority_words`, that it runs without the policy that a request's
    priority needs. `knows_developer`: that role; DeepSeek and others refuse it, and templates that don't know it raise.
    `system` means the same, to OpenAI too.
    """

    name: str
    source: str
    chat_path: str = "chat/completions"
    completions_path: str | None = None
    embeddings_path: str = "embeddings"
    cuts_vectors: bool = True
    models_path: str = "models"
    models_key: str = "id"
    max_tokens_field: str = "max_tokens"
    lacks: frozenset[str] = frozenset()
    fields: dict[str, str] = {}
    stream_options: dict[str, bool] | None = msgspec.field(default_factory=lambda: {"include_usage": True})
    adds: dict[str, Any] = {}
    names_model: bool = True
    count_path: str | None = None
    count_key: str = "count"
    effort_thinks: bool = False
    reads_specials: bool = False
    prompts_as_here: bool = False
    names_tool: bool = True
    calls_by_schema: bool = False
    bills_choices: bool = True
    skips_null: bool = False
    metrics_path: str = "/metrics"
    metrics: dict[str, tuple[str, ...]] = {}
    salt_field: str | None = None
    affinity_header: str | None = None
    thinking_off: str | None = None
    thinking_models: tuple[str, ...] = ()
    errors: dict[int, Reaction] = {}
    context_words: str | None = None
    priority_words: str | None = None
    knows_developer: bool = False
    is_lenient: bool = False

    @property
    def begins_with_usage(self) -> bool:
        """Whether the first chunk of an answer says already how long the prompt is."""
        return (self.stream_options or {}).get("continuous_usage_stats", False)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


_SAMPLING = ("top_k", "min_p", "repetition_penalty")
_VLLM_FIELDS = _same(
    *_SAMPLING,
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "thinking_token_budget",
    "return_token_ids",
    *STRUCTURED,
)

GENERIC = Profile(name="generic", source="OpenAI's API reference, 2026-11")
"""OpenAI's own fields, and nothing else until the settings say so."""

OPENAI = msgspec.structs.replace(GENERIC, name="openai", max_tokens_field="max_completion_tokens", knows_developer=True)

OPENROUTER = Profile(
    name="openrouter",
    source="openrouter.ai/docs: parameters, reasoning tokens; read 2026-11-29",
    fields=_same(*_SAMPLING) | {"thinking_token_budget": "reasoning.max_tokens", THOUGHTS: "reasoning"},
)

OLLAMA = Profile(
    name="ollama",
    source="docs.ollama.com/api/openai-compatibility; read 2026-11-29",
    lacks=frozenset({"n", "logit_bias", "tool_choice", "parallel_tool_calls"}),
    fields={THOUGHTS: "reasoning"},
)

LLAMA_SERVER = Profile(
    name="llama_server",
    source="llama.cpp tools/server/README.md, autumn 2026; build b11549 tried on 2026-11-30",
    completions_path="completions",
    count_path="/v1/chat/completions/input_tokens",
    count_key="input_tokens",
    reads_specials=True,
    names_tool=False,  # an object is taken for "auto", with a line in its log
    calls_by_schema=True,  # "required" lets a model write as long as it likes before its call, also up to max_tokens
    skips_null=True,  # a stream of completions begins with one
    cuts_vectors=False,
    context_words="too large to process",  # of a text to embed, with status 500
    bills_choices=False,  # of several choices or prompts, its usage is that of the first
    fields=_same("top_k", "min_p", "typical_p", "ignore_eos", "chat_template_kwargs", "dry_multiplier", "dry_base")
    | _same("dry_allowed_length", "dry_sequence_breakers", "xtc_probability", "xtc_threshold")
    | {"repetition_penalty": "repeat_penalty", "thinking_token_budget": "reasoning_budget_tokens"},
    metrics={"running": ("llamacpp:requests_processing",), "waiting": ("llamacpp:requests_deferred",)},
)

SGLANG = Profile(
    name="sglang",
    source="SGLang's sampling parameters and production metrics pages, 2026",
    completions_path="completions",
    reads_specials=True,
    fields=_same(*_SAMPLING, "stop_token_ids", "min_tokens", "ignore_eos", "chat_template_kwargs")
    | _same("continue_final_message")
    | {"structured_outputs.regex": "regex"},
    metrics={
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_use": ("sglang:token_usage",),
    },
)

TGI = Profile(
    name="tgi",
    source="text-generation-inference, Messages API; in maintenance since 2025-12",
    lacks=frozenset({"n", "logit_bias", "parallel_tool_calls", "reasoning_effort"}),
    reads_specials=True,
)

HITSEND = Profile(
    name="hitsend",
    source="docs/fields.md",
    completions_path="completions",
    count_path="/v1/chat/completions/input_tokens",
    count_key="input_tokens",
    prompts_as_here=True,
    knows_developer=True,
    fields=_VLLM_FIELDS
    | _same("typical_p", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers")
    | _same("xtc_probability", "xtc_threshold"),
)

VLLM = Profile(
    name="vllm",
    source="vLLM's entrypoints and usage/metrics page: V0 to 0.32, read 2026-11-29",
    chat_path="/v1/chat/completions",
    completions_path="/v1/completions",
    embeddings_path="/v1/embeddings",
    cuts_vectors=False,  # it refuses that for models whose config doesn't speak of it
    models_path="/v1/models",
    # its grammar backends read Lark and EBNF under one name; this name of thoughts is the one that /tokenize reads, too
    fields=_VLLM_FIELDS | {"structured_outputs.lark": "structured_outputs.grammar", THOUGHTS: "reasoning"},
    # a usage in every chunk: what a client that left had received is known to the token
    stream_options={"include_usage": True, "continuous_usage_stats": True},
    count_path="/tokenize",
    effort_thinks=True,
    reads_specials=True,
    metrics={
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the second one until 0.10
        "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    },
    salt_field="cache_salt",
    context_words="maximum context length",
    priority_words="riority scheduling is not enabled",  # V0; 0.32.0 takes the field and doesn't look at it
)


def _bad(why: str) -> Reaction:
    return Reaction("invalid_request", why, outcome="ok")


_NO_MODEL = Reaction("model_not_found", "doesn't have this model", outcome="ok")
_FORBIDDEN = Reaction("permission_denied", "doesn't let this account use the model", outcome="ok")
_TOO_SLOW = Reaction("engine_timeout", "did not answer in time", outcome="failed")

WORKERS_AI = Profile(
    name="workers_ai",
    source="developers.cloudflare.com/workers-ai: errors, pricing and limits pages of 2026-09-17",
    chat_path="/v1/chat/completions",
    embeddings_path="/v1/embeddings",
    models_path="/models/search",
    models_key="name",
    fields=_same(*_SAMPLING, "chat_template_kwargs"),
    affinity_header="x-session-affinity",
    thinking_off="chat_template_kwargs.enable_thinking",
    # tried by third parties on 2026-10-05
    thinking_models=("qwen3.8", "gemma-4", "glm-4.7-flash", "nemotron"),
    errors={
        3036: Reaction("insufficient_quota", "has no neurons left today", closes="utc_midnight"),
        3040: Reaction("server_overloaded", "has no capacity", may_repeat=True),
        3021: Reaction("rate_limit_exceeded", "limits requests per minute"),
        3006: Reaction("request_too_large", "takes no request of this size", outcome="ok"),
        3007: _TOO_SLOW,
        3008: _TOO_SLOW,
        3046: _TOO_SLOW,
        5007: _NO_MODEL,
        3042: _NO_MODEL,
        5004: _bad("can't read the request"),
        3003: _bad("can't read the request"),
        3039: _bad("can't read the request"),
        5005: _bad("doesn't do this with the model"),
        5019: _bad("doesn't do this with the model"),
        5016: Reaction("permission_denied", "wants the model's licence accepted first", outcome="ok"),
        5018: _FORBIDDEN,
        3041: _FORBIDDEN,
        3023: _FORBIDDEN,
        5035: Reaction("permission_denied", "serves this model on its paid plan only", outcome="ok"),
        10000: Reaction("engine_unavailable", "refuses this server's key", outcome="failed"),
        7009: Reaction("engine_unavailable", "is away", may_repeat=True, outcome="failed"),
    },
    is_lenient=True,
)

WORKERS_AI_NATIVE = msgspec.structs.replace(
    WORKERS_AI, name="workers_ai_native", chat_path="/run/{model}", stream_options=None, names_model=False
)

PROFILES = {
    one.name: one
    for one in (
        GENERIC,
        OPENAI,
        OPENROUTER,
        OLLAMA,
        LLAMA_SERVER,
        SGLANG,
        TGI,
        HITSEND,
        VLLM,
        WORKERS_AI,
        WORKERS_AI_NATIVE,
    )
}
