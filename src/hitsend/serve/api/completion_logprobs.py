"""Logprobs in the legacy shape: four parallel arrays instead of a list of tokens.

Enters: `TextLogprob`s in any portions, an echoed prompt's tokens before them. Leaves: `LogprobsOut` of each portion,
and of all. Always true: the arrays are equally long; `text_offset` counts characters of the choice's text before the
token, the echoed prompt's among them; the prompt's first token has null for numbers; a token whose bytes are no text by
themselves is called `bytes:\\xe2\\x80`, as OpenAI does, so that two such tokens are never confused in `top_logprobs`.
Next: `completions.py`.
"""

import codecs
from collections.abc import Iterable, Sequence

import msgspec

from hitsend.core.request import PromptToken, TextLogprob
from hitsend.serve.api.logprobs import LOWEST_LOGPROB


class LogprobsOut(msgspec.Struct, frozen=True):
    """OpenAI's arrays. `top_logprobs` has the asked-for alternatives and the sampled token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class LegacyLogprobs:
    """One choice's tokens so far."""

    def __init__(self) -> None:
        self.all = LogprobsOut([], [], [], [])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def echo(self, tokens: Sequence[PromptToken], text: str, num_top: int) -> LogprobsOut:
        """The echoed prompt comes first: its tokens, and the text from whose end the answer's offsets count."""
        found = self.add(
            TextLogprob(
                token.text.token,
                token.text.logprob,
                token.text.bytes,
                tuple(TextLogprob(o.text.token, o.text.logprob, o.text.bytes) for o in token.top[:num_top]),
            )
            for token in tokens
        )
        found = LogprobsOut(
            found.tokens,
            [None, *found.token_logprobs[1:]],
            [None, *found.top_logprobs[1:]],
            [min(offset, len(text)) for offset in found.text_offset],
        )
        self.all = LogprobsOut(*(list(getattr(found, name)) for name in LogprobsOut.__struct_fields__))
        self._decoder.reset()
        self._offset = len(text)
        return found

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
