"""Server-sent events of a chat or text completion, as they come off the wire.

Enters: bytes, cut anywhere. Leaves: `Piece`s: what one event brought. Always true: comments (pings), lines that end
with CR, events of several lines and a byte order mark before the first are read as the standard says; an event over
`MOST_EVENT_BYTES` is refused; a count of tokens that can't be one is none; an error is one in whatever form it is told,
never an event that said nothing. Next: `client.py`.
"""

from codecs import BOM_UTF8
from typing import Any

import msgspec

from hitsend.core.line_ends import LineEnds

MOST_EVENT_BYTES = 4 * 1024 * 1024
MOST_TOKENS = 10_000_000
"""Nobody counts more in one answer: whoever says so, or less than none, or no number, has said nothing."""
DONE = b"[DONE]"


class BadStream(Exception):
    """What came is no stream of completions; the text says what."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: Any = None  # an object here and there, where OpenAI has its text


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: Any = None  # a text; Workers AI was seen to send the token `7` as a number, Mistral's API sends parts
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, frozen=True):
    """The server's own count: whole numbers from 0 to `MOST_TOKENS`, or None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None  # servers in Go send null for none
    usage: Any = None
    error: Any = None
    object: Any = None
    type: Any = None
    code: Any = None
    detail: Any = None


class Piece(msgspec.Struct, frozen=True):
    """One event. `content`: the answer's own text; `text`: all of it, thoughts and calls included."""

    text: str = ""
    content: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None


_DECODER = msgspec.json.Decoder(_Chunk)


def read_piece(data: bytes) -> Piece:
    """One event's data. Raises BadStream."""
    try:
        chunk = _DECODER.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadStream(f"an event that is no chunk: {error}") from error
    if (failure := _failure(chunk)) is not None:
        return Piece(error=failure)
    text = content = ""
    reason = None
    for choice in chunk.choices or ():
        said = choice.delta
        plain = (_text(said.content) if said is not None else choice.text) or ""
        content += plain
        text += plain + (_beside(said) if said is not None else "")
        reason = choice.finish_reason or reason
    return Piece(text, content, reason, _usage(chunk.usage))


def _failure(chunk: _Chunk) -> str | None:
    """The code of an error: OpenAI's form, vLLM's older one, or what FastAPI makes of an exception."""
    if chunk.error is not None:
        return _code(chunk.error)
    is_told = "error" in (chunk.object, chunk.type) or (chunk.detail is not None and not chunk.choices)
    return _code({"code": chunk.code}) if is_told else None


def _text(content: Any) -> str | None:
    """A text, a number, or parts, of which those of the answer itself count."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    return content if content is None or isinstance(content, str) else str(content)


def _usage(told: Any) -> Usage | None:
    if not isinstance(told, dict):
        return None
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(*map(_tokens, (told.get("prompt_tokens"), told.get("completion_tokens"), cached)))


def _tokens(told: Any) -> int | None:
    is_count = isinstance(told, int | float) and not isinstance(told, bool) and 0 <= told <= MOST_TOKENS
    return int(told) if is_count and told == int(told) else None


def _beside(delta: _Delta) -> str:
    said = delta.reasoning_content or delta.reasoning or ""
    if isinstance(delta.content, list):
        said += "".join(_text(part.get("thinking")) or "" for part in delta.content if isinstance(part, dict))
    for call in delta.tool_calls or ():
        if call.function is not None:
            arguments = call.function.arguments or ""
            told = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            said += (call.function.name or "") + told
    return said


def _code(error: Any) -> str:
    if isinstance(error, dict):
        if isinstance(inner := error.get("error"), dict):
            error = inner
        return str(error.get("code") or error.get("type") or "error")[:60]
    return "error"


class Events:
    """`feed` bytes, get the data of every event that they end; that of an event named `error` as an error's."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_error = False
        self._size = 0
        self._is_at_start = True
        self._line_ends = LineEnds()

    def feed(self, received: bytes) -> list[bytes]:
        """Raises BadStream where an event doesn't end."""
        *lines, self._rest = (self._rest + self._line_ends.feed(received)).split(b"\n")
        found = []
        if self._is_at_start and lines:  # a byte order mark may open the stream (the standard's section on parsing it)
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            self._is_at_start = False
        for line in lines:
            if not line:
                if self._data:
                    data = b"\n".join(self._data).strip()  # white space around JSON says nothing, around [DONE] neither
                    found.append(b'{"error":%b}' % data if self._is_error else data)
                self._data, self._size, self._is_error = [], 0, False
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
                self._size += len(line)
            elif line.startswith(b"event:"):
                self._is_error = line[6:].strip() == b"error"
        if self._size + len(self._rest) > MOST_EVENT_BYTES:
            raise BadStream(f"an event of more than {MOST_EVENT_BYTES} bytes")
        return found
