"""What is asked: conversations of one or more turns, their lengths, what they share, and which are cut off.

Enters: a `Shape` or a trace, a vocabulary, a seed. Leaves: `Ask`s. Always true: conversation `number` of a stage is the
same whatever ran before and however many run beside it; turn k+1 carries what was really answered in turns 1 to k;
texts are new each time, but for the shared system prompt; `input_tokens` counts the whole prompt of a first turn, the
system message and the template included. Next: `trace.py`.
"""

from typing import Any, Literal

import msgspec

from hitsend.load.lengths import Length, dice, fixed
from hitsend.load.words import Vocabulary

Endpoint = Literal["chat", "completions"]


class Shape(msgspec.Struct, frozen=True):
    """`system`: tokens of a system prompt that all conversations share; 0 for none. `input`: what comes on top, per
    turn; `output`: allowed per turn."""

    input: Length
    output: Length
    system: int = 0
    turns: int = 1


CUSTOMER_SERVICE = Shape(fixed(500), fixed(400), system=700)
"""700 tokens of system prompt that all share, 500 of question and context, 400 of answer."""
CHAT = Shape(fixed(60), fixed(60), system=200, turns=10)
PRESETS = {"customer-service": CUSTOMER_SERVICE, "chat": CHAT}

FILL = 0.9
"""Part of the context that a scaled preset may take: the template and rounding need the rest."""


def fitted(shape: Shape, context: int | None) -> tuple[Shape, float]:
    """The shape scaled to a model's context, and the factor (1 where it fits)."""
    mean = shape.system + shape.turns * (shape.input.a + shape.output.a)
    if context is None or mean <= context * FILL:
        return shape, 1.0
    factor = context * FILL / mean
    system = max(1, round(shape.system * factor)) if shape.system else 0
    return Shape(shape.input.scaled(factor), shape.output.scaled(factor), system, shape.turns), factor


class Recorded(msgspec.Struct, frozen=True):
    """One line of a trace: lengths to be made up, or a body as it was sent. `at_s`: when, if the trace says so."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    at_s: float | None = None
    body: dict[str, Any] | None = None


class Ask(msgspec.Struct, frozen=True):
    """One request. `body` has `messages` or `prompt` and what the workload sets; the client adds model and stream.
    `cut_after`: hang up after so many pieces of the answer."""

    body: dict[str, Any]
    input_tokens: int | None
    output_tokens: int | None
    turn: int = 1
    cut_after: int | None = None
    conversation: int = 0


class Workload(msgspec.Struct, frozen=True):
    """Everything that decides what is asked. `abort`: part of the requests that hang up in mid-answer; `has_system`:
    whether the model takes system messages; `shared`: the text of the shared system prompt (`ready` makes it)."""

    shape: Shape
    vocabulary: Vocabulary
    seed: int = 0
    abort: float = 0.0
    endpoint: Endpoint = "chat"
    has_system: bool = True
    trace: tuple[Recorded, ...] = ()
    shared: str = ""

    def conversation(self, stage: str, number: int) -> "Conversation":
        """Number `number` of a stage; stages never share a text with each other."""
        recorded = self.trace[number % len(self.trace)] if self.trace else None
        return Conversation(self, stage, number, recorded)

    def ready(self) -> "Workload":
        """With its shared system prompt made, once for the whole run."""
        if not self.shape.system:
            return self
        text = self.vocabulary.write(dice(self.seed, "shared"), self.shape.system)
        return msgspec.structs.replace(self, shared=text)


class Conversation:
    """Its asks one after the other; `ask(answer)` gives the next, None when it is over."""

    def __init__(self, workload: Workload, stage: str, number: int, recorded: Recorded | None) -> None:
        self._workload = workload
        self._recorded = recorded
        self._number = number
        self._parts = (workload.seed, stage, number)
        self._chance = dice(*self._parts)
        self._messages: list[dict[str, Any]] = []
        self._turn = 0
        self._turns = 1 if recorded is not None else workload.shape.turns

    def ask(self, answer: str | None = None) -> Ask | None:
        """The next turn; `answer` is what the last one got."""
        if self._turn == self._turns:
            return None
        self._turn += 1
        if self._recorded is not None and self._recorded.body is not None:
            return self._replay(self._recorded)
        shape = self._workload.shape
        asked = self._recorded and self._recorded.input_tokens
        allowed = self._recorded and self._recorded.output_tokens
        tokens = asked or shape.input.draw(self._chance)
        output = allowed or shape.output.draw(self._chance)
        body, expected = self._completion(tokens) if self._is_completion() else self._chat(answer, tokens)
        return Ask(body, expected, output, self._turn, self._cut(output), self._number)

    def _is_completion(self) -> bool:
        return self._workload.endpoint == "completions"

    def _completion(self, tokens: int) -> tuple[dict[str, Any], int]:
        vocabulary, shared = self._workload.vocabulary, self._workload.shape.system
        own = tokens - vocabulary.overhead
        text = vocabulary.write(self._chance, own)
        text = f"{self._workload.shared} {text}" if shared else text
        return {"prompt": text}, tokens + shared + self._more_than(own)

    def _chat(self, answer: str | None, tokens: int) -> tuple[dict[str, Any], int | None]:
        if self._turn > 1:
            said = {"role": "assistant", "content": answer or ""}
            user = {"role": "user", "content": self._workload.vocabulary.write(self._chance, tokens)}
            self._messages = [*self._messages, said, user]
            return {"messages": self._messages}, None
        self._messages, expected = self._first(tokens)
        return {"messages": self._messages}, expected

    def _first(self, tokens: int) -> tuple[list[dict[str, Any]], int]:
        """Without a shared prompt the first word is a system message of its own: templates put a default one, the same
        for every request, where none is given, and a prefix cache would then compute less than was asked for."""
        vocabulary, shared = self._workload.vocabulary, self._workload.shape.system
        if not self._workload.has_system:
            own = tokens - vocabulary.overhead
            text = vocabulary.write(self._chance, own)
            text = f"{self._workload.shared} {text}" if shared else text
            return [{"role": "user", "content": text}], tokens + shared + self._more_than(own)
        one = round(vocabulary.tokens_per_word)
        system = self._workload.shared or vocabulary.write(self._chance, one)
        rest = tokens - vocabulary.overhead - (0 if shared else one)
        user = vocabulary.write(self._chance, rest)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return messages, tokens + shared + self._more_than(rest)

    def _more_than(self, tokens: int) -> int:
        """Tokens over what was asked for: a prompt has a word, however much of it the template takes."""
        return max(0, round(self._workload.vocabulary.tokens_per_word) - tokens)

    def _replay(self, recorded: Recorded) -> Ask:
        body = dict(recorded.body or {})
        output = body.get("max_completion_tokens") or body.get("max_tokens")
        allowed = output if isinstance(output, int) else None
        return Ask(body, None, allowed, 1, self._cut(allowed or 16), self._number)

    def _cut(self, output: int) -> int | None:
        chance = dice(*self._parts, self._turn, "cut")  # of its own: what is cut doesn't hang on what is said
        return chance.randint(1, max(1, output - 1)) if chance.random() < self._workload.abort else None
