"""Prompts that the caller wrote whole: no template, no messages, only text or token ids.

Enters: a `Request` with `prompts`. Leaves: `Prompts`, the ids of each. Always true: text is a document, so control
spellings in it stay text, and BOS comes in front where the model wants it; ids are taken as they are after a check
against the vocabulary; a prompt that makes no token is refused. Next: `budget.py`.
"""

from typing import Protocol

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest
from hitsend.core.events import Tokenized
from hitsend.core.request import Request
from hitsend.core.vocabulary import Vocabulary


class TextToIds(Protocol):
    """The part of `TextChild` that prompts need."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's table."""
        ...

    async def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> tuple[int, ...]:
        """Ids of a text."""
        ...


class Prompts(msgspec.Struct, frozen=True):
    """The ids of every prompt, in order. Instants are `Clock.now()` seconds."""

    every: tuple[tuple[int, ...], ...]
    num_control_tokens: int
    started_at: float
    ended_at: float
    keep_ids: bool = False

    @property
    def num_tokens(self) -> int:
        """Of the longest one: if it fits, they all do."""
        return max(map(len, self.every))

    def tokenized(self) -> Tokenized:
        """The event, over all prompts together; the ids are in it only where text is captured."""
        joined = tuple(token for ids in self.every for token in ids)
        return Tokenized(
            started_at=self.started_at,
            ended_at=self.ended_at,
            num_tokens=len(joined),
            num_control_tokens=self.num_control_tokens,
            spans=(),
            prompt_token_ids=joined if self.keep_ids else None,
        )


async def prepare_prompts(request: Request, text: TextToIds, clock: Clock, *, keep_ids: bool) -> Prompts:
    """The prompts as ids. Raises InvalidRequest and what tokenising raises."""
    started_at = clock.now()
    vocabulary = text.vocabulary
    found: list[tuple[int, ...]] = []
    for index, prompt in enumerate(request.prompts):
        where = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            ids = await text.tokenize(prompt, add_special=True)
        else:
            ids = prompt
            _check_ids(ids, vocabulary.size, where)
        if not ids:
            raise InvalidRequest(f"{where} makes no tokens: there is nothing to go on from", param=where)
        found.append(ids)
    control = sum(token in vocabulary.control_ids for ids in found for token in ids)
    return Prompts(tuple(found), control, started_at, clock.now(), keep_ids)


def _check_ids(ids: tuple[int, ...], size: int, where: str) -> None:
    for at, token in enumerate(ids):
        if not 0 <= token < size:
            place = f"{where}[{at}]"
            raise InvalidRequest(f"{place}: {token} is no token id of this model (0 to {size - 1})", param=place)
