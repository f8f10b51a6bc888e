"""A conversation, built up from the small pieces in which some dialects send it.

Enters: who said, thought, called or returned what, in order. Leaves: `Message`s, with the fields that templates read.
Always true: what one assistant turn thought, said and called stands in one message; a result answers a call that was
made earlier, so that nobody can forge one; an error names the place that the caller gave. Next: `responses_items.py`.
"""

from typing import Any

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Message


class Turns:
    """Collects turns. `where` is how errors name the place."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._calls: dict[str, bool] = {}  # whether it waits for its result
        self._thoughts: list[str] = []
        self._words: list[str] = []
        self._open_calls: list[dict[str, Any]] = []

    def say(self, role: str, text: str, *, joins: bool = False) -> None:
        """A turn of somebody else than the assistant. `joins`: it goes on with the turn before, if that one's role is
        the same."""
        self._close()
        last = self._messages[-1] if self._messages else None
        if joins and last is not None and last.role == role and not last.fields:
            self._messages[-1] = Message(role, f"{last.content}\n\n{text}")
        else:
            self._messages.append(Message(role, text))

    def think(self, text: str) -> None:
        """The assistant thought, before it said or called anything in this turn."""
        if self._words or self._open_calls:
            self._close()
        self._thoughts.append(text)

    def answer(self, text: str, *, is_new: bool = False) -> None:
        """The assistant said. `is_new`: as a message of its own."""
        if is_new and (self._words or self._open_calls):
            self._close()
        self._words.append(text)

    def call(self, call_id: str, name: str, arguments: str, *, where: str) -> None:
        """The assistant called a function. Raises InvalidRequest for an id that is empty or used twice in the turn."""
        if not call_id or any(call["id"] == call_id for call in self._open_calls):
            raise InvalidRequest(f"{where} is empty or used twice", param=where)
        function = {"name": name, "arguments": arguments}
        self._open_calls.append({"id": call_id, "type": "function", "function": function})
        self._calls[call_id] = True

    def result(self, call_id: str, text: str, *, where: str) -> None:
        """What a call returned. Raises InvalidRequest when no such call waits for it."""
        if call_id not in self._calls:
            raise InvalidRequest(f"{where} matches no earlier call", param=where)
        if not self._calls[call_id]:
            raise InvalidRequest(f"{where}: this call has its result already", param=where)
        self._calls[call_id] = False
        self._close()
        self._messages.append(Message("tool", text, {"tool_call_id": call_id}))

    def end(self, *, where: str) -> tuple[Message, ...]:
        """All turns. Raises InvalidRequest where nobody said anything."""
        self._close()
        if not self._messages:
            raise InvalidRequest(f"{where}: nothing is said in it", param=where)
        return tuple(self._messages)

    def _close(self) -> None:
        if not (self._thoughts or self._words or self._open_calls):
            return
        fields: dict[str, Any] = {}
        if self._thoughts:
            fields["reasoning_content"] = "".join(self._thoughts)
        if self._open_calls:
            fields["tool_calls"] = self._open_calls
        content = "".join(self._words) if self._words or not self._open_calls else None
        self._messages.append(Message("assistant", content, fields))
        self._thoughts, self._words, self._open_calls = [], [], []
