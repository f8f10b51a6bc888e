"""Text to token ids, with control tokens only where the template wrote them.

Enters: a rendered text that still carries its marks, and a function that tokenises plain text. Leaves: ids, and where
in them each stretch of the text went. Always true: a control token comes from an unmarked special spelling or not at
all (what the plain tokeniser returns is checked, and cut finer until it holds none); without specials inside, plain
text is tokenised in one piece, exactly as the model was trained; the work grows with the text's length only.
Next: `prompt.py`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from hitsend.core.errors import EngineFailed
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.marks import Marks, Spellings

Encode = Callable[[str], Sequence[int]]
"""Plain text to ids: nothing added in front or behind, control spellings read as text, no blank put in front."""

_BLANKS = " \t\n\v\f\r"


class Tokenizer(Protocol):
    """Text to ids and back, for one model."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The table of all tokens."""
        ...

    def encode_prompt(self, text: str, marks: Marks) -> "Encoded":
        """A rendered prompt. Raises EngineFailed."""
        ...

    def encode_text(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Somebody's text. `parse_special` lets special spellings become their tokens. Raises EngineFailed."""
        ...


class Piece(NamedTuple):
    """Characters [start, end) of the marked text became tokens [first, last)."""

    start: int
    end: int
    first: int
    last: int


class Encoded(NamedTuple):
    """Ids and how they lie over the text. `num_control_tokens` counts the template's control tokens."""

    token_ids: tuple[int, ...]
    num_control_tokens: int
    pieces: tuple[Piece, ...]


class VocabularyTokenizer:
    """A Tokenizer over any function that can tokenise plain text."""

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self._vocabulary = vocabulary
        self._encode = encode
        self.spellings = Spellings(vocabulary)

    @property
    def vocabulary(self) -> Vocabulary:
        """The table of all tokens."""
        return self._vocabulary

    def encode_prompt(self, text: str, marks: Marks) -> Encoded:
        """A rendered prompt: split at the template's special spellings, plain between them. Raises EngineFailed."""
        ids: list[int] = []
        pieces: list[Piece] = []
        for start, end, token in self._split(text):
            first = len(ids)
            if token is None:
                ids += self._plain(self._prefixed(marks.drop(text[start:end]), is_first=start == 0))
            else:
                ids.append(token)
            pieces.append(Piece(start, end, first, len(ids)))
        shift = self._add_bos(ids)
        moved = tuple(Piece(p.start, p.end, p.first + shift, p.last + shift) for p in pieces)
        control = sum(token in self._vocabulary.control_ids for token in ids)
        return Encoded(tuple(ids), control, moved)

    def encode_text(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Somebody's text, for counting and looking. Raises EngineFailed."""
        ids: list[int] = []
        for start, end, token in self._split(text) if parse_special else [(0, len(text), None)]:
            if token is None:
                ids += self._plain(self._prefixed(text[start:end], is_first=start == 0))
            else:
                ids.append(token)
        if add_special:
            self._add_bos(ids)
        return ids

    def _add_bos(self, ids: list[int]) -> int:
        bos = self._vocabulary.bos_id
        if self._vocabulary.adds_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
            return 1
        return 0

    def _prefixed(self, text: str, *, is_first: bool) -> str:
        return f" {text}" if text and is_first and self._vocabulary.adds_space_prefix else text

    def _split(self, text: str) -> list[tuple[int, int, int | None]]:
        """(start, end, special token or None for plain text), in order and without gaps but for swallowed blanks."""
        pattern = self.spellings.every.pattern
        parts: list[tuple[int, int, int | None]] = []
        at = 0
        for match in pattern.finditer(text) if pattern is not None else ():
            token = self.spellings.ids[match.group()]
            end = match.start()
            if token in self._vocabulary.strips_left_ids:
                end = at + len(text[at:end].rstrip(_BLANKS))
            if end > at:
                parts.append((at, end, None))
            at = match.end()
            parts.append((match.start(), at, token))
            if token in self._vocabulary.strips_right_ids:
                at = _blanks_end(text, at)
        if at < len(text):
            parts.append((at, len(text), None))
        return parts

    def _encoded(self, text: str) -> Sequence[int]:
        try:
            return self._encode(text) if text else ()
        except ValueError as failure:
            raise EngineFailed(f"the tokenizer failed on {len(text)} characters") from failure

    def _plain(self, text: str) -> list[int]:
        """Tokens of text in which nothing is special."""
        pattern = self.spellings.blanks.pattern
        if pattern is None:
            return self._unspecial(text)
        ids: list[int] = []
        at = 0
        for match in pattern.finditer(text):
            ids += self._unspecial(text[at : match.start()])
            ids.append(self.spellings.blank_ids[match.group()])
            at = match.end()
        return ids + self._unspecial(text[at:])

    def _unspecial(self, text: str) -> list[int]:
        """Cut finer and finer until the tokeniser agrees that nothing is special."""
        if not text:
            return []
        for cuts in (self.spellings.added.cuts, self.spellings.every.cuts, _each_character):
            bounds = [0, *cuts(text), len(text)]
            ids: list[int] = []
            for start, end in pairwise(bounds):
                ids += self._encoded(text[start:end])
            if self.spellings.guarded_ids.isdisjoint(ids):
                return ids
        raise EngineFailed("the tokenizer makes a control token out of a single character of plain text")


def _blanks_end(text: str, at: int) -> int:
    while at < len(text) and text[at] in _BLANKS:
        at += 1
    return at


def _each_character(text: str) -> list[int]:
    return list(range(1, len(text)))


def token_range(encoded: Encoded, text: str, start: int, end: int, *, marks: Marks, vocabulary: Vocabulary) -> range:
    """The tokens that hold any character of the marked text's [start, end)."""
    if end <= start or not encoded.pieces:
        return range(0)
    first = _position(encoded, text, start, marks=marks, vocabulary=vocabulary, is_end=False)
    last = _position(encoded, text, end, marks=marks, vocabulary=vocabulary, is_end=True)
    return range(first, max(first, last))


def _position(encoded: Encoded, text: str, at: int, *, marks: Marks, vocabulary: Vocabulary, is_end: bool) -> int:
    index = bisect_left(encoded.pieces, at, key=lambda p: p.end) if is_end else _piece_at(encoded.pieces, at)
    if index >= len(encoded.pieces):
        return len(encoded.token_ids)
    piece = encoded.pieces[index]
    if at <= piece.start or at >= piece.end:
        return piece.last if at >= piece.end else piece.first
    ids = encoded.token_ids[piece.first : piece.last]
    ends = list(accumulate(len(vocabulary.token_bytes[token]) for token in ids))
    whole = len(marks.drop(text[piece.start : piece.end]).encode())
    before = len(marks.drop(text[piece.start : at]).encode())
    surplus = ends[-1] - whole if ends else 0
    if surplus not in {0, 1}:
        # The tokeniser rewrote the text (normalisation): only the piece as a whole can be named.
        return piece.last if is_end else piece.first
    before += surplus
    if is_end:
        return piece.first + min(len(ids), bisect_left(ends, before) + 1)
    return piece.first + bisect_right(ends, before)


def _piece_at(pieces: Sequence[Piece], at: int) -> int:
    return bisect_right(pieces, at, key=lambda p: p.end)
