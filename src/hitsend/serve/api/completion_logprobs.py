"""Logprobs in the legacy shape: four parallel arrays instead of a list of tokens.

Enters: `TextLogprob`s in any portions. Leaves: `LogprobsOut` of each portion, and of all. Always true: the arrays are
equally long; `text_offset` counts characters of the generated text before the token; a token whose bytes are no text by
themselves is called `bytes:\\xe2\\x80`, as OpenAI does, so that two such tokens are never confused in `top_logprobs`.
Next: `completions.py`.
"""

import codecs
from collections.abc import Iterable

import msgspec

from hitsend.core.request import TextLogprob
from hitsend.serve.api.logprobs import LOWEST_LOGPROB


class LogprobsOut(msgspec.Struct, frozen=True):
    """OpenAI's arrays. `top_logprobs` has the asked-for alternatives and the sampled token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class LegacyLogprobs:
    """One choice's tokens so far."""

    def __init__(self) -> None:
        self.all = LogprobsOut([], [], [], [])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, entries: Iterable[TextLogprob]) -> LogprobsOut:
        """Take a portion, return it in the legacy shape."""
        found = LogprobsOut([], [], [], [])
        for entry in entries:
            found.tokens.append(_name(entry))
            found.token_logprobs.append(_finite(entry.logprob))
            # the sampled one goes in last: it is itself whatever an alternative of the same spelling says
            shown = {_name(other): _finite(other.logprob) for other in entry.top}
            found.top_logprobs.append(shown | {_name(entry): _finite(entry.logprob)})
            found.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(bytes(entry.bytes)))
        for name in LogprobsOut.__struct_fields__:
            getattr(self.all, name).extend(getattr(found, name))
        return found


def _name(entry: TextLogprob) -> str:
    try:
        return bytes(entry.bytes).decode() if entry.bytes else entry.token
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)


def _finite(logprob: float) -> float:
    return max(LOWEST_LOGPROB, logprob)
