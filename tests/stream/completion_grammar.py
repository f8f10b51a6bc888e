"""The grammar of a stream of /v1/completions, beside those of the other dialects in `hitsend.testing`."""

import json
from typing import Any

from hitsend.testing import StreamSeen, StreamViolation


def check_completion_stream(
    data: bytes, *, n: int = 1, include_usage: bool = False, is_cut: bool = False
) -> StreamSeen:
    """Hold the bytes against the grammar, return what they said. Raises StreamViolation.

    (chunk | ping)* (one finish per choice, usage chunk if asked for, [DONE] | error frame): per choice nothing follows
    its finish, and after [DONE] or an error nothing follows at all. `is_cut`: only the end may be missing.
    """
    whole, _, rest = data.rpartition(b"\n\n")
    _expect(not rest or is_cut, "the stream ends inside a frame", rest[:80])
    seen = StreamSeen(texts=dict.fromkeys(range(n), ""), finish_reasons={}, logprob_tokens={})
    for frame in whole.split(b"\n\n") if whole else []:
        _expect(not seen.is_done and seen.error is None, "a frame after the end", frame)
        _expect(b"\n" not in frame and b"\r" not in frame, "a frame of more than one line", frame)
        if frame.startswith(b":"):
            seen.num_pings += 1
            continue
        _expect(frame.startswith(b"data: "), "neither data nor comment", frame)
        if frame == b"data: [DONE]":
            is_whole = set(seen.finish_reasons) == set(range(n)) and (seen.usage is not None) == include_usage
            _expect(is_whole and seen.hitsend is not None, "[DONE] too early", seen)
            seen.is_done = True
            continue
        _frame(json.loads(frame[6:]), seen, n, include_usage)
    _expect(is_cut or seen.is_done or seen.error is not None, "neither [DONE] nor an error", data[-80:])
    return seen


def _frame(chunk: dict[str, Any], seen: StreamSeen, n: int, include_usage: bool) -> None:
    if "error" in chunk:
        is_whole = set(chunk) == {"error"} and set(chunk["error"]) == {"message", "type", "param", "code"}
        _expect(is_whole, "a malformed error", chunk)
        seen.error = chunk["error"]
        return
    seen.num_chunks += 1
    is_next = chunk["object"] == "text_completion" and seen.hitsend is None and ("usage" in chunk) == include_usage
    _expect(is_next, "not a chunk, or out of order", chunk)
    seen.hitsend = chunk.get("hitsend")
    if not chunk["choices"]:
        _expect(bool(chunk.get("usage")) and set(seen.finish_reasons) == set(range(n)), "no usage chunk", chunk)
        seen.usage = chunk["usage"]
        return
    _expect(not chunk.get("usage"), "usage beside choices", chunk)
    for choice in chunk["choices"]:
        index, reason = choice["index"], choice["finish_reason"]
        _expect(0 <= index < n and index not in seen.finish_reasons, "a choice out of order", chunk)
        seen.texts[index] += choice["text"]
        seen.logprob_tokens.setdefault(index, []).extend((choice["logprobs"] or {"tokens": []})["tokens"])
        if reason is not None:
            _expect(reason in ("stop", "length", "content_filter"), "no finish_reason of OpenAI's", chunk)
            seen.finish_reasons[index] = reason


def _expect(holds: bool, what: str, where: Any) -> None:
    if not holds:
        raise StreamViolation(f"{what}: {where}")
