"""What a chunk of OpenAI's chat API has in it, as far as it is anybody's business here.

Enters: nothing. Leaves: structs to decode an event into. Always true: a field is of the types that it has in
many places; what is rarer is put right by `mended.py`, or can't be read. Next: `openai_wire.py`.
"""

from typing import Any

import msgspec

from hitsend.serve.engine.upstream_calls import CallIn, FunctionIn
from hitsend.serve.engine.upstream_logprobs import LogprobsIn


class _In(msgspec.Struct, frozen=True, gc=False):
    """Base of what comes in: unknown fields are nobody's business here."""


class PartIn(_In, frozen=True, gc=False):
    """Mistral's models that think send these in place of a text."""

    type: str
    text: str | None = None
    thinking: str | tuple["PartIn", ...] | None = None


class DeltaIn(_In, frozen=True, gc=False):
    """What is new in it."""

    content: str | tuple[PartIn, ...] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: tuple[CallIn, ...] | None = None
    function_call: FunctionIn | None = None

    @property
    def calls(self) -> tuple[CallIn, ...]:
        """Pieces of calls; who knows one call only has no list of them."""
        only = self.function_call
        if self.tool_calls or only is None or not (only.name or only.arguments):
            return self.tool_calls or ()
        return (CallIn(0, None, only),)


class ChoiceIn(_In, frozen=True, gc=False):
    """A piece of one choice."""

    index: int | None = 0
    delta: DeltaIn | None = None
    message: DeltaIn | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: LogprobsIn | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    usage: Any = None
    stop_reason: Any = None
    matched_stop: Any = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended it, as vLLM and SGLang tell it; a number is a token's."""
        found = self.matched_stop if self.stop_reason is None else self.stop_reason
        return found if isinstance(found, str) and self.finish_reason == "stop" else None


_FINE = (200, "0", "200", "success")
"""Codes of answers that are wrapped, but none of an error."""


class ChunkIn(_In, frozen=True, gc=False):
    """One event."""

    choices: tuple[ChoiceIn, ...] | None = ()
    usage: Any = None
    error: Any = None
    object: Any = None
    code: Any = None
    type: Any = None
    error_type: Any = None
    message: Any = None
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def is_error(self) -> bool:
        """By an `error`, as vLLM's older form has it, or by a code and a message with nothing beside them."""
        is_bare = not self.choices and self.usage is None and self.message and self.code
        return bool(self.error or self.object == "error" or (is_bare and self.code not in _FINE))
