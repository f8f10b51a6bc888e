"""What a request is billed for: counts of tokens, found once, when the request has ended.

Enters: how it ended and what the engine really computed. Leaves: a `Metered`. Always true: every computed output token
is either billed or discarded, never both; cached ⊆ prompt and reasoning ⊆ completion. The policy:

    completed   the whole prompt (once, whatever `n`), and each choice's tokens up to and including its end
    cancelled   prompt tokens that really went through the model (or came from cache), output tokens really produced
    failed      the same
    refused     nothing: the engine never saw it

Tokens computed after a choice's end was known (a stop string is found in the text, one step later) are discarded.
Next: `pricing.py`.
"""

from typing import Literal

import msgspec

from hitsend.core.request import Usage

Outcome = Literal["completed", "cancelled", "failed", "refused"]


class ChoiceCounts(msgspec.Struct, frozen=True):
    """One choice: tokens the engine sampled, of which the first `ended_after` belong to it (None: all of them)."""

    produced_tokens: int
    ended_after: int | None = None
    reasoning_tokens: int = 0


class PromptCounts(msgspec.Struct, frozen=True):
    """The prompt: its length, the tokens that went through the model, and those read from the prefix cache instead."""

    num_tokens: int
    computed_tokens: int
    cached_tokens: int = 0


class Metered(msgspec.Struct, frozen=True):
    """What is billed, and what was computed for nobody."""

    usage: Usage
    discarded_tokens: int


class WrongCounts(Exception):
    """A bug in hitsend: counts that contradict each other. Never billed."""


def meter(outcome: Outcome, prompt: PromptCounts, choices: tuple[ChoiceCounts, ...]) -> Metered:
    """Apply the policy above. Raises WrongCounts."""
    if outcome == "refused":
        return Metered(Usage(), 0)
    reached = min(prompt.num_tokens, prompt.cached_tokens + prompt.computed_tokens)
    billed = [_billed(choice) for choice in choices]
    usage = Usage(
        prompt_tokens=prompt.num_tokens if outcome == "completed" else reached,
        completion_tokens=sum(billed),
        cached_tokens=prompt.cached_tokens,
        reasoning_tokens=sum(choice.reasoning_tokens for choice in choices),
    )
    check(usage)
    return Metered(usage, sum(choice.produced_tokens for choice in choices) - sum(billed))


def check(usage: Usage) -> None:
    """Raises WrongCounts unless the subsets are subsets and nothing is negative."""
    if not 0 <= usage.cached_tokens <= usage.prompt_tokens:
        raise WrongCounts(f"cached_tokens {usage.cached_tokens} of prompt_tokens {usage.prompt_tokens}")
    if not 0 <= usage.reasoning_tokens <= usage.completion_tokens:
        raise WrongCounts(f"reasoning_tokens {usage.reasoning_tokens} of completion_tokens {usage.completion_tokens}")


def _billed(choice: ChoiceCounts) -> int:
    if choice.produced_tokens < 0 or (choice.ended_after is not None and choice.ended_after < 0):
        raise WrongCounts(f"produced_tokens {choice.produced_tokens}, ended_after {choice.ended_after}")
    if choice.ended_after is None:
        return choice.produced_tokens
    return min(choice.produced_tokens, choice.ended_after)
