"""What was said so far, and what a typed line means.

Enters: lines and answers. Leaves: request bodies, totals, a file. Always true: pure but for `save`, which never
overwrites a file; a line is a command only if it begins with `/`, and `//` begins a message with a slash. Next:
`painter.py`.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from hitsend.cli import CallFailed

COMMANDS = {
    "/help": "this list",
    "/reset": "forget what was said (the system message stays)",
    "/system": "show the system message, or set it: /system Be brief.",
    "/stats": "where the last answer's time went, and what this conversation cost",
    "/save": "write the conversation to a file: /save talk.md, or .json for the messages",
    "/quit": "leave (so do Ctrl-D, and Ctrl-C at the prompt)",
}

BLOCK = '"""'


class Spent(msgspec.Struct):
    """What the answers so far took."""

    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_microusd: int = 0

    def add(self, usage: dict[str, Any], cost_microusd: int) -> None:
        """One more answer."""
        self.answers += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.completion_tokens += usage["completion_tokens"]
        self.cost_microusd += cost_microusd


class Conversation:
    """The turns, and the body that asks for the next one."""

    def __init__(self, model: str, system: str | None = None, **fields: Any) -> None:
        self.model = model
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.spent = Spent()
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def ask(self, text: str) -> dict[str, Any]:
        """Add a question; returns the request."""
        self.turns.append({"role": "user", "content": text})
        return {
            "model": self.model,
            "messages": self.messages(),
            "stream_options": {"include_usage": True},
            **self._fields,
        }

    def answered(self, text: str) -> None:
        """Add what was answered, be it cut off; a question that got nothing is taken back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        elif self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def reset(self) -> None:
        """Forget the turns."""
        self.turns.clear()

    def messages(self) -> list[dict[str, str]]:
        """As the server wants them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def save(self, path: Path) -> None:
        """Write it down. Raises CallFailed where that can't be done."""
        if path.suffix == ".json":
            text = json.dumps({"model": self.model, "messages": self.messages()}, ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"**{turn['role']}**\n\n{turn['content']}" for turn in self.messages())
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError as error:
            raise CallFailed(f"{path} is there already: give another name") from error
        except OSError as error:
            raise CallFailed(f"can't write {path}: {error.strerror}") from error


def command(line: str) -> tuple[str, str] | None:
    """(command, argument), or None for a message."""
    if not line.startswith("/") or line.startswith("//"):
        return None
    name, _, argument = line.partition(" ")
    return name, argument.strip()


def message(text: str) -> str:
    """What is sent for a text that is no command."""
    return text[1:] if text.startswith("//") else text


class Lines:
    r"""Joins typed lines: one that ends in a backslash goes on, and so does all between two lines of `\"\"\"`."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._is_block = False

    @property
    def is_open(self) -> bool:
        """Whether more lines belong to what was typed."""
        return self._is_block or bool(self._kept)

    def take(self, line: str) -> str | None:
        """The whole text once it is complete."""
        if line.strip() == BLOCK:
            self._is_block = not self._is_block
            return None if self._is_block else self.end()
        if self._is_block:
            self._kept.append(line)
            return None
        if line.endswith("\\"):
            self._kept.append(line[:-1])
            return None
        self._kept.append(line)
        return self.end()

    def end(self) -> str:
        """What there is, and begin anew."""
        text = "\n".join(self._kept)
        self._kept, self._is_block = [], False
        return text
