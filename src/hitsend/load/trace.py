"""A recorded workload: JSON Lines.

Enters: lines, each `{"input_tokens": N, "output_tokens": N}` (lengths; the text is made up) or an OpenAI request body
(`messages` or `prompt`), either with `"at_s"` if it is to be replayed at its time. Leaves: `Recorded`s. Always true:
what can't be used is refused with its line's number and the field; nothing is skipped in silence. Next: `sample.py`.
"""

import math
from codecs import BOM_UTF8
from collections.abc import Iterable
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.load.arrivals import MOST_REQUESTS
from hitsend.load.lengths import MOST_TOKENS
from hitsend.load.workload import Endpoint, Recorded

MOST_LINE_BYTES = 16 * 1024 * 1024


def read_trace(name: str, lines: Iterable[bytes], endpoint: Endpoint | None = None) -> tuple[Recorded, ...]:
    """Every line, in order, for an endpoint or for any. Raises ConfigError with `name` and the line's number."""
    found: list[Recorded] = []
    wanted = endpoint and ("messages" if endpoint == "chat" else "prompt")
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)  # noqa: PLW2901  # editors on Windows put one there
        if line.strip():
            found.append(_line(f"{name} line {number}", line, wanted))
        if len(found) > MOST_REQUESTS:
            raise ConfigError(f"{name}: more than {MOST_REQUESTS} requests")
    if not found:
        raise ConfigError(f"{name}: no request in it")
    timed = sum(one.at_s is not None for one in found)
    if timed not in (0, len(found)):
        raise ConfigError(f"{name}: at_s stands in {timed} of {len(found)} lines: give it in all or in none")
    return tuple(sorted(found, key=lambda one: one.at_s or 0.0)) if timed else tuple(found)


def _line(where: str, line: bytes, wanted: str | None) -> Recorded:
    if len(line) > MOST_LINE_BYTES:
        raise ConfigError(f"{where}: {len(line)} bytes, at most {MOST_LINE_BYTES}")
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: it must be an object")
    at_s = _seconds(where, document)
    if "messages" in document or "prompt" in document:
        return Recorded(at_s=at_s, body=_body(where, document, wanted))
    if "input_tokens" in document and "output_tokens" in document:
        input_tokens, output_tokens = (_tokens(where, document, name) for name in ("input_tokens", "output_tokens"))
        return Recorded(input_tokens, output_tokens, at_s)
    raise ConfigError(f"{where}: it needs messages, prompt, or input_tokens and output_tokens")


def _seconds(where: str, document: dict[str, Any]) -> float | None:
    at_s = document.pop("at_s", None)
    if at_s is None:
        return None
    is_number = isinstance(at_s, int | float) and not isinstance(at_s, bool)
    if not is_number or not math.isfinite(at_s) or at_s < 0:
        raise ConfigError(f"{where}: at_s is {str(at_s)[:40]!r}: it must be seconds, from 0 on")
    return float(at_s)


def _tokens(where: str, document: dict[str, Any], name: str) -> int:
    value = document[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise ConfigError(f"{where}: {name} is {str(value)[:40]!r}: it must be a whole number from 1 to {MOST_TOKENS}")
    return value


def _body(where: str, document: dict[str, Any], wanted: str | None) -> dict[str, Any]:
    messages = document.get("messages")
    if wanted is not None and wanted not in document:
        raise ConfigError(f"{where}: it has no {wanted}, which is what this endpoint takes (flag --endpoint)")
    if "messages" in document and not (isinstance(messages, list) and messages):
        raise ConfigError(f"{where}: messages must be a list with something in it")
    return {name: value for name, value in document.items() if name not in ("model", "stream", "stream_options")}
