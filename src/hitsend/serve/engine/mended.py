"""Chunks whose fields are of another type than OpenAI's, put right where only one thing can be meant.

Enters: an event that the usual decoder refused. Leaves: a chunk, or None. Always true: no text, thought or call is made
up or left out; what goes with an answer (log-probabilities, ids of tokens) is left out where it can't be meant, because
an answer isn't lost by it. Next: `openai_wire.py`.

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

from hitsend.serve.engine.upstream_chunks import ChunkIn
from hitsend.serve.engine.upstream_logprobs import LogprobsIn

_TEXTS = ("content", "reasoning_content", "reasoning")


def mended_chunk(document: bytes) -> ChunkIn | None:
    """What was meant; None where that can't be told."""
    try:
        tree = json.loads(document, strict=False, parse_constant=lambda _: None)
        if isinstance(tree, list) and len(tree) == 1:
            tree = tree[0]
        if not isinstance(tree, dict):
            return None
        choices = [_choice(one) for one in _listed(tree.get("choices"))]
        return msgspec.convert(tree | {"choices": choices}, ChunkIn)
    except (ValueError, RecursionError):  # a ValidationError is one
        return None


def _choice(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    choice = given | {"index": _number(given.get("index"))}
    for name in ("delta", "message"):
        choice[name] = _delta(given[name]) if given.get(name) else None
    reason = given.get("finish_reason")
    choice["finish_reason"] = reason.get("type") if isinstance(reason, dict) else reason
    choice["text"] = _text(given.get("text"))
    choice["logprobs"] = _kept(given.get("logprobs"), LogprobsIn)
    for name in ("token_ids", "prompt_token_ids"):
        choice[name] = _kept(given.get(name), tuple[int, ...])
    return choice


def _delta(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    delta = given | {name: _text(given.get(name), takes_parts=name == "content") for name in _TEXTS}
    delta["refusal"] = _text(given.get("refusal") or None)
    delta["tool_calls"] = [_call(one) for one in _listed(given.get("tool_calls")) if one is not None]
    only = given.get("function_call")
    delta["function_call"] = _function(only) if isinstance(only, dict) else None
    return delta


def _text(given: Any, *, takes_parts: bool = False) -> Any:
    """Of thoughts and texts; parts stay parts."""
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Mapping):
        inner = given.get("text", given.get("content"))
        return given if given and inner is None else _text(inner, takes_parts=takes_parts)
    if isinstance(given, list):
        if takes_parts:
            return [{"type": "text", "text": one} if isinstance(one, str) else one for one in given]
        parts = [_text(one) for one in given]
        return "".join(parts) if all(isinstance(one, str) for one in parts) else given
    return json.dumps(given)


def _call(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    function = given.get("function")
    if not isinstance(function, dict):  # its name may stand there, or beside it
        function = {"name": function or given.get("name"), "arguments": given.get("arguments")}
    call_id, index = given.get("id"), given.get("index")
    return {
        "index": None if index is None else _number(index),
        "id": call_id if call_id is None or isinstance(call_id, str) else json.dumps(call_id),
        "function": _function(function),
    }


def _function(given: dict[str, Any]) -> dict[str, Any]:
    arguments = given.get("arguments")
    if arguments is not None and not isinstance(arguments, str | dict):
        arguments = json.dumps(arguments or {})
    return given | {"arguments": arguments}


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
