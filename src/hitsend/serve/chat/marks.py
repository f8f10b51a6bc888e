"""Marks: how text that somebody typed stays tellable from what the template wrote, through any template.

Enters: the spellings of a vocabulary's special tokens, and every text of one request. Leaves: the same texts with an
invisible mark inside each spelling. Always true: a mark is a Unicode noncharacter that occurs in no text and no
template of this request; after rendering, a special spelling without a mark inside was written by the template, so only
those become control tokens; the marks themselves are dropped before tokenising and never change what is decoded.
Next: `tokenizer.py`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hitsend.core.errors import InvalidRequest
from hitsend.core.vocabulary import Vocabulary

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]
_NONCHARACTERS += [chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF)]

_BLANKS = " \t\r\n\u2581"
_TYPES = frozenset({"function", "custom", "text", "object", "string", "number", "integer", "boolean", "array", "null"})
"""Values of fields named `type` that templates compare with: never marked."""


class Spellings:
    """The special tokens of one vocabulary, by how they are written.

    `every`: control tokens, and tokens that the checkpoint added by spelling (`<think>`); `guarded_ids` are these.
    `blanks`: added tokens that are only blanks or one character. Those are plain text to everybody, and found here
    because libllama needs quadratic time to find them in long runs.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        control = _by_spelling(vocabulary, vocabulary.control_ids)
        added = _by_spelling(vocabulary, vocabulary.user_defined_ids)
        self.blank_ids: Mapping[str, int] = {t: i for t, i in added.items() if len(t) == 1 or not t.strip(_BLANKS)}
        added = {text: token for text, token in added.items() if text not in self.blank_ids}
        self.ids: Mapping[str, int] = added | control
        self.guarded_ids = vocabulary.control_ids | frozenset(added.values())
        self.control_ids = vocabulary.control_ids
        self.every = Finder(self.ids)
        self.control = Finder(control)
        self.added = Finder(added)
        self.blanks = Finder(self.blank_ids)


def _by_spelling(vocabulary: Vocabulary, token_ids: Iterable[int]) -> dict[str, int]:
    spelled = {vocabulary.spelling(token): token for token in sorted(token_ids, reverse=True)}
    return {text: token for text, token in spelled.items() if text and vocabulary.token_bytes[token] == text.encode()}


class Finder:
    """Finds spellings in text, in time that grows only with the text."""

    def __init__(self, spellings: Iterable[str]) -> None:
        known = [text for text in spellings if text]
        self.pattern = re.compile(_trie_pattern(known)) if known else None
        self._starts = {text[:n] for text in known for n in range(1, len(text))}
        self._ends = {text[n:] for text in known for n in range(1, len(text))}
        self._joined = "\0".join(known)
        self._longest = max(map(len, known), default=0)

    def cuts(self, text: str) -> list[int]:
        """Where to put a mark so that no spelling is left whole: one character into each, overlapping ones included."""
        found: list[int] = []
        if self.pattern is None:
            return found
        match = self.pattern.search(text)
        while match is not None:
            found.append(match.start() + 1)
            match = self.pattern.search(text, match.start() + 1)
        return found

    def edges(self, text: str) -> list[int]:
        """Where to put a mark so that nothing written before or after the text can complete a spelling with it.

        Templates like to trim: the edges of the trimmed text are edges too.
        """
        trimmed = text.strip()
        shift = len(text) - len(text.lstrip())
        return self._edges(text) + ([shift + at for at in self._edges(trimmed)] if trimmed != text else [])

    def _edges(self, text: str) -> list[int]:
        reach = min(len(text), self._longest - 1)
        found = [0] if any(text[:n] in self._ends for n in range(1, reach + 1)) else []
        found += [len(text) - n + 1 for n in range(1, reach + 1) if text[-n:] in self._starts]
        if not found and 0 < len(text) < self._longest and text in self._joined:
            found.append(0)
        return found


def _trie_pattern(spellings: Sequence[str]) -> str:
    """One regular expression for all spellings, longest first, in which no two branches begin alike."""
    root: dict[str, Any] = {}
    for text in spellings:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        chain = ""
        while len(node) == 1 and "" not in node:
            ((character, node),) = node.items()
            chain += re.escape(character)
        branches = [re.escape(character) + write(below) for character, below in sorted(node.items()) if character]
        if not branches:
            return chain
        return f"{chain}(?:{'|'.join(branches)}){'?' if '' in node else ''}"

    return write(root)


class Marks(NamedTuple):
    """The three noncharacters of one request: inside spellings, at an anchor, at the end of a continued message."""

    cut: str
    anchor: str
    end: str

    def drop(self, text: str) -> str:
        """The text as it was typed."""
        return text.replace(self.cut, "").replace(self.anchor, "").replace(self.end, "")


def choose_marks(texts: Sequence[str]) -> Marks:
    """Three noncharacters that occur in none of the texts. Raises InvalidRequest where somebody used them all."""
    free = (mark for mark in _NONCHARACTERS if not any(mark in text for text in texts))
    chosen = [mark for mark, _ in zip(free, range(3), strict=False)]
    if len(chosen) < 3:
        raise InvalidRequest(
            f"messages use more than {len(_NONCHARACTERS) - 3} of Unicode's {len(_NONCHARACTERS)} noncharacters; "
            "three must stay free",
            param="messages",
        )
    return Marks(*chosen)


def mark_text(text: str, finder: Finder, mark: str) -> str:
    """The text with a mark inside every special spelling, and where its edges could become part of one."""
    positions = sorted({*finder.cuts(text), *finder.edges(text)})
    if not positions:
        return text
    bounds = [0, *positions, len(text)]
    return mark.join(text[start:end] for start, end in pairwise(bounds))


def mark_value(value: Any, finder: Finder, mark: str, *, name: str = "") -> Any:
    """The same for every text inside a JSON value; keys too."""
    if isinstance(value, str):
        return value if name == "type" and value in _TYPES else mark_text(value, finder, mark)
    if isinstance(value, list | tuple):
        return [mark_value(item, finder, mark, name=name) for item in value]
    if isinstance(value, dict):
        return {_mark_key(key, finder, mark): mark_value(item, finder, mark, name=key) for key, item in value.items()}
    return value


def _mark_key(key: str, finder: Finder, mark: str) -> str:
    """Keys are looked up by the template: only one that holds a whole spelling, which no honest key does, is marked."""
    return mark_text(key, finder, mark) if finder.cuts(key) else key


def texts_in(value: Any) -> Iterable[str]:
    """Every text inside a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from texts_in(item)


def anchor_position(text: str, finder: Finder, mark: str) -> int | None:
    """Where an anchor disturbs a template least: inside the words, after the last special spelling, in the middle.

    None where there is nothing to hold on to.
    """
    start = 0
    if finder.pattern is not None:
        for match in finder.pattern.finditer(text):
            start = match.end()
    words = text[start:].strip()
    if not words:
        start, words = 0, text.strip() if start == 0 else ""
    if not words:
        return None
    first = text.index(words[0], start)
    middle = first + max(1, len(words) // 2)
    while middle < len(text) and text[middle - 1] == mark:
        middle += 1
    return middle


def common_start(left: str, right: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_end(left: str, right: str) -> int:
    """How many characters both end with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[len(left) - middle : len(left) - low] == right[len(right) - middle : len(right) - low]:
            low = middle
        else:
            high = middle - 1
    return low
