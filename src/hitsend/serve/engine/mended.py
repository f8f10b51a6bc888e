"""Chunks whose fields are of another type than OpenAI's, put right where only one thing can be meant.

Enters: an event that the usual decoder refused. Leaves: a chunk, or None. Always true: no text, thought or call is made
up or left out; what goes with an answer (log-probabilities, ids of tokens) is left out where it can't be meant, because
an answer isn't lost by it; half a surrogate pair waits for its other half, and is U+FFFD without. Next:
`openai_wire.py`.

    "index": "0", 0.0                    a number
    "delta": [], "", "message": ""       nothing (PHP's empty object; a field that is always there)
    "content": 42, ["a"], {"text": "a"}  the text, as it was written
    "reasoning": {"text": "hm"}          the thoughts, also in a list
    "logprobs": -0.5, [], NaN            none: nobody who asked for them is told a number that isn't one
    "finish_reason": {"type": "stop"}    SGLang's own
    "tool_calls": {…}, [null, {…}]       calls; also with ids that are numbers, and arguments that are []
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from hitsend.serve.engine.upstream_chunks import ChunkIn, LogprobsIn

_TEXTS = ("content", "reasoning_content", "reasoning")


class Mender:
    """One stream's. It keeps what of a text waits for its other half."""

    def __init__(self) -> None:
        self._halves: dict[tuple[Any, ...], str] = {}

    def chunk(self, document: bytes) -> ChunkIn | None:
        """What was meant; None where that can't be told."""
        try:
            tree = json.loads(document, strict=False, parse_constant=lambda _: None)
            if isinstance(tree, list) and len(tree) == 1:
                tree = tree[0]
            if not isinstance(tree, dict):
                return None
            choices = [self._choice(one) for one in _listed(tree.get("choices"))]
            return msgspec.convert(tree | {"choices": choices}, ChunkIn)
        except (ValueError, RecursionError):  # a ValidationError is one
            return None

    def _choice(self, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        choice = given | {"index": _number(given.get("index"))}
        for name in ("delta", "message"):
            choice[name] = self._delta(given[name], choice["index"], name) if given.get(name) else None
        reason = given.get("finish_reason")
        choice["finish_reason"] = reason.get("type") if isinstance(reason, dict) else reason
        choice["text"] = self._text(given.get("text"), (choice["index"], "text"))
        choice["logprobs"] = _kept(given.get("logprobs"), LogprobsIn)
        for name in ("token_ids", "prompt_token_ids"):
            choice[name] = _kept(given.get(name), tuple[int, ...])
        return choice

    def _delta(self, given: Any, index: Any, place: str) -> Any:
        if not isinstance(given, dict):
            return given
        delta = given | {name: self._text(given.get(name), (index, place, name)) for name in _TEXTS}
        delta["refusal"] = self._text(given.get("refusal") or None, (index, place, "refusal"))
        calls = _listed(given.get("tool_calls"))
        delta["tool_calls"] = [self._call(one, (index, place, at)) for at, one in enumerate(calls) if one is not None]
        return delta

    def _text(self, given: Any, at: tuple[Any, ...]) -> Any:
        """Of thoughts and texts; parts stay parts."""
        if isinstance(given, str):
            return self._joined(given, at)
        if isinstance(given, Mapping):
            inner = given.get("text", given.get("content"))
            return given if given and inner is None else self._text(inner, at)
        if isinstance(given, list):
            if at[-1] == "content":
                return [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
            parts = [self._text(one, at) for one in given]
            return "".join(parts) if all(isinstance(one, str) for one in parts) else given
        return given if given is None else json.dumps(given)

    def _joined(self, text: str, at: tuple[Any, ...]) -> str:
        text = self._halves.pop(at, "") + text
        if text and "\ud800" <= text[-1] <= "\udbff":
            self._halves[at] = text[-1]
            text = text[:-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _call(self, given: Any, at: tuple[Any, ...]) -> Any:
        if not isinstance(given, dict):
            return given
        function = given.get("function")
        if not isinstance(function, dict):  # its name may stand there, or beside it
            function = {"name": function or given.get("name"), "arguments": given.get("arguments")}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = self._joined(arguments, (*at, "arguments"))
        elif arguments is not None and not isinstance(arguments, dict):
            arguments = json.dumps(arguments or {})
        call_id, index = given.get("id"), given.get("index")
        return {
            "index": None if index is None else _number(index),
            "id": call_id if call_id is None or isinstance(call_id, str) else json.dumps(call_id),
            "function": function | {"arguments": arguments},
        }


def _listed(given: Any) -> list[Any]:
    """Raises ValueError for what is no list, and isn't one thing in place of one."""
    if isinstance(given, list):
        return given
    if given and not isinstance(given, dict):
        raise ValueError
    return [given] if given else []


def _number(given: Any) -> Any:
    """A whole one, however it is written."""
    if isinstance(given, str) and given.strip().isdecimal():
        return int(given)
    return int(given) if isinstance(given, float) and given.is_integer() else given


def _kept(given: Any, kind: Any) -> Any:
    try:
        msgspec.convert(given, kind | None)
    except msgspec.ValidationError:
        return None
    return given
