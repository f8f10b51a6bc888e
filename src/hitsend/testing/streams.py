"""Automata that hold a stream's bytes against the grammar of its dialect.

Enters: what a client received. Leaves: what the stream said. Always true: the first broken rule raises
`StreamViolation` with the place; nothing is guessed or repaired. Next: `../serve/stream/sse.py`, which frames them.
"""

from collections.abc import Iterator
from typing import Any

import msgspec


class StreamViolation(AssertionError):
    """A stream broke the grammar; the message says where."""


class StreamSeen(msgspec.Struct):
    """What a stream said. Everything that is a dictionary goes by choice; a call is (id, name, arguments)."""

    texts: dict[int, str] = {}
    finish_reasons: dict[int, str] = {}
    logprob_tokens: dict[int, list[str]] = {}
    reasoning: dict[int, str] = {}
    tool_calls: dict[int, list[tuple[str, str, str]]] = {}
    usage: dict[str, Any] | None = None
    hitsend: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    num_pings: int = 0
    num_chunks: int = 0
    is_done: bool = False


def check_stream(data: bytes, *, n: int = 1, include_usage: bool = False, is_cut: bool = False) -> StreamSeen:
    """Hold a chat stream's bytes against the grammar, return what it said. Raises StreamViolation.

    pings* (chunk | ping)* (finishing chunks, usage chunk if asked for, [DONE] | error frame): per choice the role comes
    first, one chunk has a finish_reason and nothing follows it; after [DONE] or an error nothing follows at all.
    `is_cut`: the client left in mid-stream, so the end, and only the end, may be missing.
    """
    whole, _, rest = data.rpartition(b"\n\n")
    if rest and not is_cut:
        raise StreamViolation(f"the stream ends inside a frame: {rest[:80]!r}")
    seen = StreamSeen(texts={}, finish_reasons={}, logprob_tokens={})
    for frame in whole.split(b"\n\n") if whole else []:
        _check_frame(frame, seen, n, include_usage)
    if not is_cut and not seen.is_done and seen.error is None:
        raise StreamViolation("the stream has neither [DONE] nor an error")
    return seen


def _check_frame(frame: bytes, seen: StreamSeen, n: int, include_usage: bool) -> None:  # noqa: FBT001  # as in `seen`
    if seen.is_done or seen.error is not None:
        raise StreamViolation(f"a frame after the end: {frame[:80]!r}")
    if b"\n" in frame or b"\r" in frame:
        raise StreamViolation(f"a frame of more than one line: {frame[:80]!r}")
    if frame.startswith(b":"):
        seen.num_pings += 1
        return
    if not frame.startswith(b"data: "):
        raise StreamViolation(f"neither data nor comment: {frame[:80]!r}")
    if frame == b"data: [DONE]":
        if set(seen.finish_reasons) != set(range(n)) or (seen.usage is None) == include_usage or seen.hitsend is None:
            raise StreamViolation(f"[DONE] too early: {seen}")
        seen.is_done = True
        return
    document = msgspec.json.decode(frame.removeprefix(b"data: "))
    if "error" in document:
        if set(document) != {"error"} or set(document["error"]) != {"message", "type", "param", "code"}:
            raise StreamViolation(f"a malformed error: {document}")
        seen.error = document["error"]
    else:
        _check_chunk(document, seen, n, include_usage)


def _check_chunk(chunk: dict[str, Any], seen: StreamSeen, n: int, include_usage: bool) -> None:  # noqa: FBT001
    seen.num_chunks += 1
    if chunk["object"] != "chat.completion.chunk" or ("usage" in chunk) != include_usage or seen.hitsend is not None:
        raise StreamViolation(f"not a chunk, or out of order: {chunk}")
    seen.hitsend = chunk.get("hitsend")
    if not chunk["choices"]:
        if not chunk.get("usage") or set(seen.finish_reasons) != set(range(n)):
            raise StreamViolation(f"a chunk without choices that isn't the usage chunk: {chunk}")
        seen.usage = chunk["usage"]
        return
    if chunk.get("usage"):
        raise StreamViolation(f"usage beside choices: {chunk}")
    for choice in chunk["choices"]:
        _check_choice(choice, seen, n)


def _check_call(piece: dict[str, Any], calls: list[tuple[str, str, str]]) -> None:
    function = piece["function"]
    if piece["index"] == len(calls):
        if piece["type"] != "function" or piece["id"] in {call_id for call_id, _, _ in calls}:
            raise StreamViolation(f"a call begins wrongly: {piece}")
        calls.append((piece["id"], function["name"], function["arguments"]))
    elif piece["index"] == len(calls) - 1 and set(piece) == {"index", "function"} and set(function) == {"arguments"}:
        call_id, name, arguments = calls[-1]
        calls[-1] = (call_id, name, arguments + function["arguments"])
    else:
        raise StreamViolation(f"a piece of a call out of order: {piece}")


def _check_choice(choice: dict[str, Any], seen: StreamSeen, n: int) -> None:
    index, delta = choice["index"], choice["delta"]
    is_first = index not in seen.texts
    if not 0 <= index < n or index in seen.finish_reasons or is_first != (delta.get("role") == "assistant"):
        raise StreamViolation(f"choice {index} out of order: {choice}")
    seen.texts[index] = seen.texts.get(index, "") + (delta.get("content") or "")
    if "reasoning" in delta:
        if delta["reasoning"] != delta["reasoning_content"]:
            raise StreamViolation(f"two names for thoughts that differ: {choice}")
        seen.reasoning[index] = seen.reasoning.get(index, "") + delta["reasoning"]
    for call in delta.get("tool_calls", ()):
        _check_call(call, seen.tool_calls.setdefault(index, []))
    entries = (choice["logprobs"] or {"content": []})["content"]
    seen.logprob_tokens.setdefault(index, []).extend(entry["token"] for entry in entries)
    if choice["finish_reason"] is not None:
        if choice["finish_reason"] not in ("stop", "length", "tool_calls", "content_filter"):
            raise StreamViolation(f"no finish_reason of OpenAI's: {choice}")
        seen.finish_reasons[index] = choice["finish_reason"]


class EventsSeen(msgspec.Struct):
    """What a stream of named events said: of /v1/responses the last response, of /v1/messages the message."""

    names: list[str] = []
    last: dict[str, Any] = {}
    error: dict[str, Any] | None = None
    num_pings: int = 0


def check_responses_stream(data: bytes, *, is_cut: bool = False) -> EventsSeen:
    """Hold a stream of /v1/responses against the grammar. Raises StreamViolation.

    created in_progress (item.added (part.added delta* text.done part.done | delta* arguments.done) item.done)*
    (completed | incomplete), or failed at any place after created; numbers without a gap; what the deltas add up to is
    what the done events and the last response say.
    """
    seen = EventsSeen(names=[], last={})
    done: list[dict[str, Any]] = []
    open_item: dict[str, Any] | None = None
    text = ""
    for number, (name, event) in enumerate(_named_events(data, seen, is_cut=is_cut)):
        _expect(event.get("sequence_number") == number, "a gap in the numbers", event)
        _expect((number < 2) == (name in ("response.created", "response.in_progress")), "out of order", event)
        _expect(not seen.last, "an event after the end", event)
        if name == "response.output_item.added":
            _expect(open_item is None and event["output_index"] == len(done), "an item inside another", event)
            open_item, text = event["item"], ""
            _expect(not event["item"].get("arguments") and not event["item"].get("content"), "not empty", event)
        elif name == "response.output_item.done":
            _expect(open_item is not None and event["item"]["id"] == open_item["id"], "another item ended", event)
            _expect(_said(event["item"]) == text, f"the deltas said {text!r}", event)
            done.append(event["item"])
            open_item = None
        elif name in ("response.completed", "response.incomplete", "response.failed"):
            seen.last = event["response"]
            _expect(event["response"]["status"] == name.partition(".")[2], "another status", event)
            if name == "response.failed":
                seen.error = event["response"]["error"]
            else:
                _expect(open_item is None and event["response"]["output"] == done, "other items than came", event)
        elif number >= 2:
            at = (event["item_id"], event["output_index"])
            _expect(open_item is not None and at == (open_item["id"], len(done)), "for no open item", event)
            text += event["delta"] if name.endswith(".delta") else ""
            told = event.get("part", event)
            _expect(told.get("text", told.get("arguments", text)) == text, "told another text", event)
    _expect(bool(seen.last) or is_cut, "the stream has no end", {"names": seen.names})
    return seen


def _said(item: dict[str, Any]) -> str:
    text: str = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    return text


def check_messages_stream(data: bytes, *, is_cut: bool = False) -> EventsSeen:
    """Hold a stream of /v1/messages against the grammar; builds the message up as clients do. Raises StreamViolation.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop, or error at
    any place after message_start. A call's input stays the text that its deltas add up to.
    """
    seen = EventsSeen(names=[], last={})
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    fields["input_json_delta"] = "partial_json"
    is_open = is_over = False
    for name, event in _named_events(data, seen, is_cut=is_cut):
        blocks = seen.last.get("content", [])
        _expect((not seen.last) == (name == "message_start"), "out of order", event)
        _expect(seen.error is None and not is_over, "an event after the end", event)
        if name == "message_start":
            seen.last = event["message"]
        elif name == "content_block_start":
            _expect(not is_open and event["index"] == len(blocks), "a block inside another", event)
            _expect(seen.last["stop_reason"] is None, "a block after the message's end", event)
            said = [event["content_block"].get(field) for field in ("text", "thinking", "signature", "input")]
            _expect(not any(said), "a block that isn't empty at its start", event)
            blocks.append(event["content_block"])
            is_open = True
        elif name in ("content_block_delta", "content_block_stop"):
            _expect(is_open and event["index"] == len(blocks) - 1, "for no open block", event)
            is_open = name == "content_block_delta"
            if is_open:
                kind = event["delta"]["type"]
                blocks[-1][fields[kind]] = blocks[-1].get(fields[kind], "") + event["delta"][fields[kind]]
        elif name == "error":
            seen.error = event["error"]
        elif name == "message_delta":
            _expect(not is_open and seen.last["stop_reason"] is None, "ended inside a block, or twice", event)
            usage = seen.last["usage"] | event["usage"]
            seen.last |= event["delta"] | {"usage": usage, "hitsend": event["hitsend"]}
        else:
            _expect(name == "message_stop" and bool(seen.last["stop_reason"]), "no such event now", event)
            is_over = True
    _expect(is_over or seen.error is not None or is_cut, "the stream has no end", {"names": seen.names})
    return seen


def _named_events(data: bytes, seen: EventsSeen, *, is_cut: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    whole, _, rest = data.rpartition(b"\n\n")
    _expect(not rest or is_cut, "the stream ends inside a frame", {"rest": rest[:80]})
    for frame in whole.split(b"\n\n") if whole else []:
        if frame.startswith(b":"):
            seen.num_pings += 1
            continue
        lines = frame.split(b"\n")
        is_framed = len(lines) == 2 and lines[0].startswith(b"event: ") and lines[1].startswith(b"data: ")
        _expect(is_framed, "not one event line and one data line", {"frame": frame[:80]})
        name, event = lines[0][7:].decode(), msgspec.json.decode(lines[1][6:])
        _expect(event.get("type") == name, "two names", event)
        seen.names.append(name)
        yield name, event


def _expect(holds: bool, what: str, event: dict[str, Any]) -> None:  # noqa: FBT001  # as in an assert
    if not holds:
        raise StreamViolation(f"{what}: {event}")
