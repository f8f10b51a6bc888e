"""One request in hitsend's own words, whatever wire dialect it came in.

Enters: what `api/` parsed and `access/` found out about the caller. Leaves: frozen values that every later stage reads.
Always true: nothing here is mutable, money is integer micro-dollars (10⁻⁶ USD), `None` means "not asked for", and a
value that the client did not send is never invented here: defaults are resolved by `chat/`, where the checkpoint is
known. Next: `lifecycle.py`.
"""

from typing import Any, ClassVar, Literal

import msgspec

from hitsend.core.lifecycle import FinishReason
from hitsend.core.limits import Level, RateWindows

Role = Literal["admin", "reader", "caller"]
"""admin: everything. reader: everything that only looks, of everybody. caller: its own requests."""


IDLE_TIER = 10
"""Below all tiers that callers can have: work for when nobody else wants anything, the lines of batches."""


class Principal(msgspec.Struct, frozen=True):
    """Who is calling. `key_id` is None for the anonymous local principal; for a caller known by a JWT it is made from
    the token's issuer and subject (`jwt_…`), so that what it did is its own.

    `levels` are those with limits, from global down to the key; `models` and `endpoints` are what it may use (None:
    all; endpoints as route templates); `tier` is its class of service, 0 is served first; `max_tier` the best it may
    ask for.
    """

    key_id: str | None = None
    name: str = "local"
    user: str | None = None
    app: str | None = None
    org: str | None = None
    role: Role = "caller"
    levels: tuple[Level, ...] = ()
    models: tuple[str, ...] | None = None
    endpoints: tuple[str, ...] | None = None
    tier: int = 1
    max_tier: int = 1

    @property
    def tenant(self) -> tuple[str, ...]:
        """Whom the engine works for, from the outermost level to the innermost; "" where unknown."""
        return (self.org or "", self.app or "", self.user or "", self.key_id or "")

    @property
    def is_anonymous(self) -> bool:
        """Whether nobody proved who they are (allowed on loopback only while no key exists)."""
        return self.key_id is None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. `content` is plain text (parts already joined); None where the wire had null or nothing.

    `fields` keeps what else the template may want (name, reasoning_content, tool_calls, tool_call_id), as JSON values.
    """

    role: str
    content: str | None = None
    fields: dict[str, Any] = {}


class SamplingAsked(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling fields as the client sent them; None where it was silent. Ranges were checked by `api/`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    seed: int | None = None


class SamplingParams(msgspec.Struct, frozen=True):
    """The values that are really used, every one of them known. Order of use: see `loop/sampler.py`.

    temperature 0 is greedy; top_k 0, top_p 1, min_p 0, presence/frequency 0, repetition 1, typical_p 1,
    dry_multiplier 0 and xtc_probability 0 mean "off".
    `seed` is always set: a fresh one is drawn where the client gave none, and the record shows it.
    `logit_bias` is (token id, bias in -100..100) pairs; `top_logprobs` is 0..20 and only read when `logprobs` is true.
    `prompt_logprobs` (0..20) wants a log-probability of every prompt token and so many alternatives to each.
    `stop_token_ids` end the output as the model's own end tokens do; none of both is sampled before `min_tokens`, and
    with `ignore_eos` the model's own never are.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is its JSON schema, {} where none was given."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool = False


class ToolChoice(msgspec.Struct, frozen=True):
    """What the model may or must call. A named function is `required` with that one name in `names`."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()


class OutputFormat(msgspec.Struct, frozen=True):
    """What the answer has to look like. `value`: a JSON schema, a regex, the choices, or a Lark grammar, by `kind`."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "lark"]
    value: Any = None
    name: str | None = None
    strict: bool = True


class Request(msgspec.Struct, frozen=True):
    """One request. `max_tokens` None means "as much as fits"; `warnings` lists fields accepted without effect.

    `tier` is the class of service asked for (0 is served first), None: the principal's own; `names_tier`: the answer
    names the one that was used.
    `cache_salt`: only requests with the same one share cached prefixes, within their tenant.
    `prompts` (texts or token ids) stand in for `messages` where the caller wrote them whole; choice i answers i // n.
    `return_token_ids`: the answer has the ids of prompt and output beside their texts.
    `route`: the one that chose `model`.
    """

    request_id: str
    model: str
    messages: tuple[Message, ...]
    principal: Principal = Principal()
    sampling: SamplingAsked = SamplingAsked()
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    user: str | None = None
    metadata: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_format: OutputFormat | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: str | None = None
    tier: int | None = None
    names_tier: bool = False
    prompts: tuple[str | tuple[int, ...], ...] = ()
    cache_salt: str | None = None
    return_token_ids: bool = False
    route: str | None = None

    @property
    def served_tier(self) -> int:
        """The tier in which it is served."""
        return self.principal.tier if self.tier is None else self.tier


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request. cached ⊆ prompt and reasoning ⊆ completion: subsets, never added on top."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One candidate: its id, and its natural-log probability under the model before temperature and filters."""

    token_id: int
    logprob: float


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token and, where asked for, the best alternatives in falling order."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """One prompt token: its logprob after what stood before it, its rank (1: the likeliest), and the best tokens there
    in falling order."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...] = ()


class TextLogprob(msgspec.Struct, frozen=True):
    """A token as clients see it: text (with U+FFFD where bytes are no text), its exact bytes, its logprob,
    alternatives."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top: tuple["TextLogprob", ...] = ()

    def shown(self) -> dict[str, Any]:
        """For the flight record: without the bytes."""
        others = [{"token": other.token, "logprob": round(other.logprob, 4)} for other in self.top]
        return {"token": self.token, "logprob": round(self.logprob, 4), "top": others}


class PromptToken(msgspec.Struct, frozen=True):
    """A prompt token as clients see it; the first one has no logprob. `top`: the likeliest, with ranks 1, 2, …"""

    token_id: int
    text: TextLogprob
    logprob: float | None = None
    rank: int | None = None
    top: tuple["PromptToken", ...] = ()


class Started(msgspec.Struct, frozen=True):
    """The pipeline's first word: a hold was taken and an engine accepted the job. Until then an error has a status.

    `created` is Unix seconds; `system_fingerprint` names what computes (model file and engine build), where known;
    `prompt_tokens` is exact by now. `has_more`: the next item is there at once, so that both can be one write.
    """

    request_id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_tokens: int = 0
    windows: RateWindows = RateWindows()
    has_more: bool = False


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of the choice's call number `index`. Its first piece has `id` and `name`; `arguments` is JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True):
    """What the pipeline yields: text of one choice that is safe to show, or that choice's end.

    `reasoning` is thinking text, apart from `text`; `tool_calls` are pieces of calls. `prompt`, where it was asked for:
    the tokens of the prompt, all at once, on the first choice of each prompt and before anything else of its choices;
    `prompt_ids`, the same in ids; `token_ids` are the output's, each sent with its text or before it.
    `has_more`: the next delta is there already, so that both may be written at once.

    Exactly one Delta per choice carries a `finish_reason`, and nothing follows it for that choice.
    """

    index: int
    text: str = ""
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt: tuple[PromptToken, ...] = ()
    has_more: bool = False
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()

    @property
    def is_bare_text(self) -> bool:
        """Whether it is a piece of the answer's text, and nothing else."""
        more = self.reasoning or self.tool_calls or self.token_ids or self.prompt_ids or self.prompt
        return bool(self.text) and self.finish_reason is None and not more


class Completed(msgspec.Struct, frozen=True):
    """The pipeline's last word after every choice ended and the hold was settled."""

    usage: Usage
    cost_microusd: int
    timings: dict[str, float]
    warnings: tuple[str, ...] = ()
    has_more: ClassVar[bool] = False
