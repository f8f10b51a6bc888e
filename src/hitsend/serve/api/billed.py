"""What an answer says of itself beside its text: tokens as OpenAI has them, and hitsend's own object.

Enters: a `Usage`, or the pipeline's last word. Leaves: their JSON, for chats and completions alike. Always true:
details are subsets of tokens, never added on top. Next: `chat_response.py`.
"""

import msgspec

from hitsend.core.request import Completed, Request, Usage


class PromptDetails(msgspec.Struct, frozen=True):
    """A subset of the prompt's tokens."""

    cached_tokens: int
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """A subset of the completion's tokens."""

    reasoning_tokens: int
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageOut(msgspec.Struct, frozen=True):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Extension(msgspec.Struct, frozen=True):
    """hitsend's own object: never inside a field of OpenAI's. `matched_stops` has one entry per choice."""

    request_id: str
    cost_microusd: int
    timings: dict[str, float]
    warnings: tuple[str, ...]
    matched_stops: tuple[str | None, ...]


def usage_out(usage: Usage) -> UsageOut:
    """As the wire has it."""
    return UsageOut(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionDetails(reasoning_tokens=usage.reasoning_tokens),
    )


def extension(request: Request, completed: Completed, matched: tuple[str | None, ...]) -> Extension:
    """Our own object; `matched` has one entry per choice."""
    return Extension(
        request_id=request.request_id,
        cost_microusd=completed.cost_microusd,
        timings=completed.timings,
        warnings=tuple(dict.fromkeys((*request.warnings, *completed.warnings))),
        matched_stops=matched,
    )
