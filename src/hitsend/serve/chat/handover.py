"""Messages for an engine that renders and counts them itself: what may be asked of it, and how much to reserve.

Enters: a `Request`, and what its upstream takes. Leaves: a `Fitted`, and the prompt's tokens as a bound and as a guess.
Always true: a field that the upstream doesn't know is refused with its name, never dropped; the bound is never below
what a tokenizer makes of the text (no vocabulary has more tokens in a text than the text has bytes, and JSON's own
characters stand for what a template adds around each message); values that the client didn't ask for are the
upstream's, and their source says so. Next: `../engine/openai.py`.
"""

from typing import Any

import msgspec

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest
from hitsend.core.events import Fitted, LimitCheck
from hitsend.core.request import Request, SamplingAsked, SamplingParams

BYTES_PER_TOKEN = 4
"""The guess for what is billed where nobody counted: English text has a little more, code and other scripts less."""
TEMPLATE_TOKENS = 64
"""What a template may put in front by itself."""


_ALL_THEIRS = dict.fromkeys(SamplingAsked.__struct_fields__, "upstream")


class Handover(msgspec.Struct, frozen=True):
    """One upstream's terms. `passes` are extensions of OpenAI's fields that it knows; `is_counted`: see `Counted`."""

    engine: str
    context: int
    max_tokens: int
    passes: frozenset[str] = frozenset()
    is_counted: bool = False


class Counted(msgspec.Struct, frozen=True):
    """A prompt's tokens: `reserved` is held, `estimated` is billed where the upstream gives no usage."""

    reserved: int
    estimated: int


def count(request: Request, known: int | None) -> Counted:
    """By bytes, or by what the embedded model's tokenizer `known` of it."""
    if known is not None:
        return Counted(known, known)
    asked = [request.messages, request.tools] if request.tools else [request.messages]
    num_bytes = len(msgspec.json.encode(asked))
    return Counted(num_bytes + TEMPLATE_TOKENS, -(-num_bytes // BYTES_PER_TOKEN))


def refuse(request: Request, terms: Handover) -> None:
    """For what needs a template or tokenizer of ours. Raises InvalidRequest."""
    text = f"{request.model} is served by {terms.engine}, which renders and counts prompts itself"
    raise InvalidRequest(f"model: {text}", param="model")


def check(request: Request, terms: Handover, extensions: set[str]) -> None:
    """Whether it can be asked there at all; `extensions` are the fields it has beyond OpenAI's. Raises InvalidRequest
    naming the field."""
    if request.prompts:
        text = f"prompt: {request.model} is served by {terms.engine}, which takes messages only"
        raise InvalidRequest(text, param="prompt")
    refused = extensions - terms.passes
    if request.prompt_logprobs is not None:
        refused |= {"prompt_logprobs"}  # upstreams don't agree on where an answer has them
    for field in sorted(refused):
        raise InvalidRequest(f"{field}: {terms.engine}, which serves this model, doesn't take it", param=field)


def fit(request: Request, terms: Handover, ceiling: int | None, most_output: int | None = None) -> Fitted:
    """What will be asked for. Raises ContextLengthExceeded.

    `ceiling` where the client set no max_tokens; `most_output`: tokens per choice that the caller's levels can hold.
    """
    usual = min(most for most in (terms.max_tokens, ceiling, most_output) if most is not None)
    max_tokens = request.max_tokens or usual
    if max_tokens >= terms.context:
        text = f"{max_tokens} tokens are asked for the answer; this model's context is {terms.context} tokens"
        raise ContextLengthExceeded(text, param="max_tokens")
    limits = [LimitCheck("max_tokens", max_tokens, terms.context - 1)]
    if most_output is not None:
        limits.append(LimitCheck("max_tokens_of_levels", max_tokens, most_output))
    asked: dict[str, Any] = msgspec.to_builtins(request.sampling)
    return Fitted(
        max_tokens=max_tokens,
        limits=tuple(limits),
        sampling=msgspec.convert(
            asked | {"logprobs": request.logprobs, "top_logprobs": request.top_logprobs}, SamplingParams
        ),
        sources=_ALL_THEIRS | dict.fromkeys(asked, "client"),
    )
