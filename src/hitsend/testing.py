"""Stand-ins for the slow or unpredictable parts, shipped so that your tests can use them too.

Enters: what a test wants to happen. Leaves: objects that keep the same protocols as the real ones. Always true: no
threads, no real time, the same inputs give the same outputs, and a fake that is used wrongly raises `FakeMisused`.
Next: `serve/loop/decoder.py`, the protocol of the largest one.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.serve.loop.decoder import Batch, DecoderFailed


class FakeMisused(AssertionError):
    """The code under test broke the protocol of the fake."""


class FakeClock:
    """Time that stands still until a test moves it."""

    def __init__(self, now: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall = wall

    def now(self) -> float:
        """Seconds, as far as `advance` has brought them."""
        return self._now

    def wall(self) -> float:
        """Unix seconds, moving together with `now`."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass; it can't go backwards."""
        if seconds < 0:
            raise FakeMisused(f"time can't go back by {-seconds} s")
        self._now += seconds
        self._wall += seconds


class FakeDecoder:
    """A model without arithmetic: the logits after some tokens depend on these tokens only.

    So a sequence's output can't depend on its slot, its chunks or its neighbours, unless the loop mixes them up.
    `num_cells` None is per-stream mode; fewer than num_slots * cells_per_slot is unified mode. `logits_of(tokens)`
    replaces the default, a normal deviate per token of the vocabulary; `next_token(tokens)` only says which one is the
    likeliest. `fails(batch)` returns what is to be raised instead of computing; nothing of the batch is kept then.
    Every decoded batch is in `batches`, every move in `moves`, every copy in `copies`. Token i stands for the character
    with that code point. `clock` is moved on by `step_s` in each `decode`.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        num_slots: int = 4,
        cells_per_slot: int = 128,
        num_cells: int | None = None,
        max_batch_tokens: int = 512,
        end_token_ids: frozenset[int] = frozenset({0}),
        logits_of: Callable[[tuple[int, ...]], NDArray[np.float32]] | None = None,
        next_token: Callable[[tuple[int, ...]], int] | None = None,
        fails: Callable[[Batch], DecoderFailed | None] | None = None,
        clock: FakeClock | None = None,
        step_s: float = 0.01,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_slots = num_slots
        self.cells_per_slot = cells_per_slot
        self.num_cells = num_slots * cells_per_slot if num_cells is None else num_cells
        self.max_batch_tokens = max_batch_tokens
        self.end_token_ids = end_token_ids
        self.logits_of = logits_of
        self.next_token = next_token
        self.fails = fails
        self.clock = clock
        self.step_s = step_s
        self.slots: list[list[int]] = [[] for _ in range(num_slots)]
        self.batches: list[Batch] = []
        self.moves: list[tuple[int, int]] = []
        self.copies: list[tuple[int, int]] = []

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The characters 0, 1, 2, … in UTF-8."""
        return tuple(chr(token).encode() for token in range(self.vocab_size))

    @property
    def cells_filled(self) -> int:
        """Tokens in the cache now, over all slots."""
        return sum(len(tokens) for tokens in self.slots)

    def decode(self, batch: Batch) -> NDArray[np.float32]:
        """Append the batch to the slots' tokens, or raise what `fails` says."""
        self._check(batch)
        failure = self.fails(batch) if self.fails else None
        if failure is not None:
            raise failure
        if self.clock is not None:
            self.clock.advance(self.step_s)
        self.batches.append(batch)
        rows = []
        for token, slot, wants in zip(batch.token_ids, batch.slots, batch.wants_logits, strict=True):
            self.slots[slot].append(int(token))
            if wants:
                rows.append(self._logits(tuple(self.slots[slot])))
        return np.array(rows, dtype=np.float32).reshape(len(rows), self.vocab_size)

    def release(self, slot: int) -> None:
        """Empty the slot."""
        self.slots[slot] = []

    def move(self, source: int, target: int) -> None:
        """Move the tokens of one slot to another, empty one."""
        self._transfer(source, target)
        self.slots[source] = []
        self.moves.append((source, target))

    def copy(self, source: int, target: int) -> None:
        """Copy the tokens of one slot to another, empty one."""
        self._transfer(source, target)
        self.copies.append((source, target))

    def _transfer(self, source: int, target: int) -> None:
        if self.slots[target]:
            raise FakeMisused(f"slot {target} still holds {len(self.slots[target])} tokens")
        if not self.slots[source]:
            raise FakeMisused(f"slot {source} holds nothing to move or copy")
        self.slots[target] = list(self.slots[source])

    def _logits(self, tokens: tuple[int, ...]) -> NDArray[np.float32]:
        if self.logits_of is not None:
            return self.logits_of(tokens)
        generator = np.random.Generator(np.random.PCG64(tokens))
        logits = generator.standard_normal(self.vocab_size, dtype=np.float32) * np.float32(2.0)
        if self.next_token is not None:
            logits[self.next_token(tokens)] = 40.0
        return logits

    def _check(self, batch: Batch) -> None:
        size = len(batch.token_ids)
        if not 0 < size <= self.max_batch_tokens:
            raise FakeMisused(f"{size} tokens in a batch, limit {self.max_batch_tokens}")
        if {len(batch.positions), len(batch.slots), len(batch.wants_logits)} != {size}:
            raise FakeMisused("the arrays of a batch have different lengths")
        ends = {slot: len(tokens) for slot, tokens in enumerate(self.slots)}
        previous = 0
        for token, position, slot in zip(batch.token_ids, batch.positions, batch.slots, strict=True):
            if slot < previous:
                raise FakeMisused(f"slot {slot} comes after slot {previous}")
            if not 0 <= token < self.vocab_size:
                raise FakeMisused(f"token {token} is not in a vocabulary of {self.vocab_size}")
            if position != ends[slot]:
                raise FakeMisused(f"slot {slot} goes on at position {ends[slot]}, not {position}")
            ends[slot] += 1
            previous = slot
        if max(ends.values()) > self.cells_per_slot:
            raise FakeMisused(f"a slot would hold {max(ends.values())} tokens, limit {self.cells_per_slot}")
        if sum(ends.values()) > self.num_cells:
            raise FakeMisused(f"{sum(ends.values())} cells needed, {self.num_cells} there")


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
