"""Messages for an engine that renders and counts them itself: what may be asked of it, and how much to reserve.

Enters: a `Request`, and what its upstream takes. Leaves: a `Fitted`, and the prompt's tokens as a bound and as a guess.
Always true: a field that the upstream doesn't know is refused with its name, or left out where the settings say
so, with a warning; the bound is never below
what a tokenizer makes of the text (no vocabulary has more tokens in a text than the text has bytes, and JSON's own
characters stand for what a template adds around each message); values that the client didn't ask for are the
upstream's, and their source says so. Next: `../engine/openai.py`.
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest
from hitsend.core.events import Fitted, LimitCheck
from hitsend.core.request import Message, Request, SamplingAsked, SamplingParams

BYTES_PER_TOKEN = 4
"""The guess for what is billed where nobody counted: English text has a little more, code and other scripts less."""
_THOUGHTS = "reasoning_content"
_ALIASES = {
    "continue_final_message": "a last message of the assistant",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""What messages call it."""
TEMPLATE_TOKENS = 64
"""What a template may put in front by itself."""


Counter = Callable[[Request], Awaitable[int | None]]
"""A prompt's tokens by the tokenizer and template of the model that gets it; None where they can't be told."""

_NOTHING_ASKED, _THEIRS = SamplingAsked(), SamplingParams()
_ALL_THEIRS = dict.fromkeys(SamplingAsked.__struct_fields__, "upstream")


class Handover(msgspec.Struct, frozen=True):
    """One upstream's terms. `takes`: fields that it knows; `ignores`: others are left out. `is_counted`: the embedded
    model counts its prompts; `counter`: who else does. `takes_prompts`: also such without messages.
    `neurons_limit_micro`: what its account may use in a day. `knows_developer`: the role.
    `takes_thoughts`: in messages of the assistant.
    """

    engine: str
    context: int
    max_tokens: int
    takes: frozenset[str] = frozenset()
    ignores: bool = False
    is_counted: bool = False
    counter: Counter | None = None
    neurons_limit_micro: int | None = None
    takes_prompts: bool = False
    knows_developer: bool = True
    takes_thoughts: bool = True


class Counted(msgspec.Struct, frozen=True):
    """A prompt's tokens: `reserved` is held, `estimated` is billed where the upstream gives no usage.

    `is_exact`: a tokenizer counted them, and they are of one prompt.
    """

    reserved: int
    estimated: int
    is_exact: bool = False


def count(request: Request, known: int | None) -> Counted:
    """By bytes, or what a tokenizer has `known` of it."""
    if known is not None:
        return Counted(known, known, is_exact=len(request.prompts) < 2)
    if request.prompts:
        sizes = [len(prompt.encode() if isinstance(prompt, str) else prompt) for prompt in request.prompts]
        are_ids = not any(isinstance(prompt, str) for prompt in request.prompts)
        return Counted(sum(sizes) + len(sizes), sum(sizes) if are_ids else -(-sum(sizes) // BYTES_PER_TOKEN))
    asked = [request.messages, request.tools] if request.tools else [request.messages]
    num_bytes = len(msgspec.json.encode(asked))
    return Counted(num_bytes + TEMPLATE_TOKENS, -(-num_bytes // BYTES_PER_TOKEN))


def is_settled(request: Request, terms: Handover, bound: Counted, ceiling: int | None) -> bool:
    """Whether the exact count would change nothing of what is decided before the request is sent: no limit and no day's
    allowance has to contain it, and even the bound leaves the answer its room in the context."""
    if request.principal.levels or terms.neurons_limit_micro is not None:
        return False
    wanted = request.max_tokens or (terms.max_tokens if ceiling is None else min(terms.max_tokens, ceiling))
    return bound.reserved + wanted < terms.context


def refuse(request: Request, terms: Handover) -> None:
    """For what needs a template or tokenizer of ours. Raises InvalidRequest."""
    text = f"{request.model} is served by {terms.engine}, which renders and counts prompts itself"
    raise InvalidRequest(f"model: {text}", param="model")


def check(request: Request, terms: Handover, asked: set[str]) -> tuple[str, ...]:
    """The fields that will be left out, of those that were `asked` for. Raises InvalidRequest naming the field."""
    if request.prompts and not terms.takes_prompts:
        text = f"prompt: {request.model} is served by {terms.engine}, which takes messages only"
        raise InvalidRequest(text, param="prompt")
    if request.reasoning_effort is not None and set(request.template_kwargs) == {"enable_thinking"}:
        asked = asked - {"chat_template_kwargs"}  # it says what the effort says
    if request.continue_final_message:
        asked = asked - {"add_generation_prompt"}  # belongs to it
    unknown = sorted(asked - terms.takes)
    # several choices can't be left out: who asked for them reads them; nor can what no upstream gives where we look
    refused = unknown if not terms.ignores else [field for field in unknown if field == "n"]
    if request.prompt_logprobs is not None:
        refused = [*refused, "prompt_logprobs"]  # upstreams don't agree on where an answer has them
    for field in refused:
        name = field.partition(".")[0]
        what = f"{name} ({_ALIASES[name]})" if name in _ALIASES else name
        raise InvalidRequest(f"{what}: {terms.engine}, which serves this model, doesn't take it", param=name)
    return tuple(unknown)


def handed_over(request: Request, terms: Handover, dropped: tuple[str, ...]) -> Request:
    """The request as it is sent and counted, saying what was left out of it."""
    if not terms.knows_developer and any(message.role == "developer" for message in request.messages):
        messages = (_as_system(message) if message.role == "developer" else message for message in request.messages)
        request = msgspec.structs.replace(request, messages=tuple(messages))
    if not terms.takes_thoughts and any(_THOUGHTS in message.fields for message in request.messages):
        request = msgspec.structs.replace(request, messages=tuple(map(_without_thoughts, request.messages)))
        dropped = (*dropped, _THOUGHTS)
    warnings = tuple(f"{field}: left out, {terms.engine} doesn't take it" for field in dropped)
    return msgspec.structs.replace(request, warnings=(*request.warnings, *warnings)) if warnings else request


def _without_thoughts(message: Message) -> Message:
    fields = {name: value for name, value in message.fields.items() if name != _THOUGHTS}
    return msgspec.structs.replace(message, fields=fields)


def _as_system(message: Message) -> Message:
    return msgspec.structs.replace(message, role="system")


def fit(
    request: Request, terms: Handover, ceiling: int | None, most_output: int | None = None, prompt_tokens: int = 0
) -> Fitted:
    """What will be asked for. Raises ContextLengthExceeded.

    `ceiling` where the client set no max_tokens; `most_output`: tokens per choice that the caller's levels can hold;
    `prompt_tokens` where they are known.
    """
    left = terms.context - prompt_tokens
    usual = min(most for most in (terms.max_tokens, ceiling, most_output, max(1, left - 1)) if most is not None)
    max_tokens = request.max_tokens or usual
    if max_tokens >= left:
        of_prompt = f"the prompt has {prompt_tokens} tokens, " if prompt_tokens else ""
        text = (
            f"{of_prompt}{max_tokens} tokens are asked for the answer; this model's context is {terms.context} tokens"
        )
        raise ContextLengthExceeded(text, param="messages" if prompt_tokens >= terms.context else "max_tokens")
    limits = [LimitCheck("max_tokens", max_tokens, left - 1)]
    if most_output is not None:
        limits.append(LimitCheck("max_tokens_of_levels", max_tokens, most_output))
    sampling, sources = _sampling(request)
    return Fitted(
        max_tokens=max_tokens, limits=tuple(limits), sampling=sampling, sources=sources, warnings=request.warnings
    )


def _sampling(request: Request) -> tuple[SamplingParams, dict[str, str]]:
    """The values as far as they are known here, and whose they are."""
    if request.sampling == _NOTHING_ASKED and not request.logprobs:
        return _THEIRS, _ALL_THEIRS
    asked: dict[str, Any] = msgspec.to_builtins(request.sampling)
    logprobs = {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs}
    return msgspec.convert(asked | logprobs, SamplingParams), _ALL_THEIRS | dict.fromkeys(asked, "client")
