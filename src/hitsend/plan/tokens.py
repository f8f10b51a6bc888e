"""How many tokens texts become, by language and kind, and what that costs: `hitsend plan tokens`.

Enters: texts and a function that counts tokens. Leaves: `TextCount`s and sums of them. Always true: counts are the
tokenizer's own, nothing is estimated; the language is guessed from script and common words and says `unknown` where
that isn't clear; characters are code points, words what blanks part (a character each where a script has none). Read
`cost.py` for the money.

    fertility   tokens per word: 1 would be a word a token (arXiv 2012.15613, section 3)
"""

import re
from collections import Counter
from collections.abc import Iterable

import msgspec

_SCRIPTS = (
    # language, first and last code point of a block that decides
    ("ja", 0x3040, 0x30FF),
    ("ko", 0xAC00, 0xD7AF),
    ("zh", 0x4E00, 0x9FFF),
    ("th", 0x0E00, 0x0E7F),
    ("hi", 0x0900, 0x097F),
    ("ar", 0x0600, 0x06FF),
    ("he", 0x0590, 0x05FF),
    ("el", 0x0370, 0x03FF),
    ("ru", 0x0400, 0x04FF),
)
_NO_BLANKS = frozenset({"ja", "zh", "th"})
_WORDS = {
    "en": "the of and to in is that for it with as was on are this be by from",
    "de": "der die und das ist nicht ein eine mit von den zu auf für sich dem im",
    "fr": "le la les et des est une dans que qui pour pas sur du au avec ce",
    "es": "el la los las y que en es una por con para del se no su al",
    "it": "il la di che e un una per non sono con del della i gli nel",
    "pt": "o a os as e que em um uma para com não do da no na por",
    "nl": "de het een en van is dat niet op te met voor zijn aan ook",
    "pl": "i w nie na się z to że do jest jak od po ale za",
    "tr": "ve bir bu için ile da de çok ne gibi daha olarak var",
    "cs": "a v se na je že to s z do ale jako pro by i",
    "sv": "och att det som en på är av för med den till inte",
}
_STOP = {language: frozenset(words.split()) for language, words in _WORDS.items()}
_CODE = re.compile(
    r"^\s*(def |class |import |from \w+ import|#include|function |const |let |var |public |private |fn |func )|"
    r"[;{}]\s*$|^\s*(if|for|while)\s*\(",
    re.MULTILINE,
)


class TextCount(msgspec.Struct, frozen=True, kw_only=True):
    """One text, or several added up."""

    language: str
    kind: str
    texts: int
    characters: int
    num_bytes: int
    words: int
    tokens: int

    @property
    def fertility(self) -> float | None:
        """Tokens per word; None without words."""
        return self.tokens / self.words if self.words else None

    @property
    def characters_per_token(self) -> float | None:
        """None without tokens."""
        return self.characters / self.tokens if self.tokens else None

    @property
    def bytes_per_token(self) -> float | None:
        """None without tokens."""
        return self.num_bytes / self.tokens if self.tokens else None


def count_text(text: str, tokens: int, *, language: str | None = None, kind: str | None = None) -> TextCount:
    """Measure one text whose tokens were counted."""
    spoken = language or language_of(text)
    return TextCount(
        language=spoken,
        kind=kind or kind_of(text),
        texts=1,
        characters=len(text),
        num_bytes=len(text.encode()),
        words=num_words(text, spoken),
        tokens=tokens,
    )


def add_up(counts: Iterable[TextCount]) -> list[TextCount]:
    """By language and kind, the dearest first: most tokens per word."""
    found: dict[tuple[str, str], TextCount] = {}
    for one in counts:
        key = (one.language, one.kind)
        before = found.get(key)
        found[key] = one if before is None else _both(before, one)
    return sorted(found.values(), key=lambda one: -(one.fertility or 0))


def _both(one: TextCount, other: TextCount) -> TextCount:
    return TextCount(
        language=one.language,
        kind=one.kind,
        texts=one.texts + other.texts,
        characters=one.characters + other.characters,
        num_bytes=one.num_bytes + other.num_bytes,
        words=one.words + other.words,
        tokens=one.tokens + other.tokens,
    )


def language_of(text: str) -> str:
    """Two letters, or `unknown`. Scripts first: kana decide for Japanese even among ideographs."""
    letters = [character for character in text[:20_000] if character.isalpha()]
    if not letters:
        return "unknown"
    counts: Counter[str] = Counter()
    for character in letters:
        point = ord(character)
        for language, first, last in _SCRIPTS:
            if first <= point <= last:
                counts[language] += 1
                break
    if counts["ja"] * 20 > len(letters):
        return "ja"
    if counts and counts.most_common(1)[0][1] * 2 > len(letters):
        return counts.most_common(1)[0][0]
    return _latin(text[:20_000])


def _latin(text: str) -> str:
    words = re.findall(r"[^\W\d_]+", text.casefold())
    hits = Counter({language: sum(word in stop for word in words) for language, stop in _STOP.items()})
    (best, most), (_, second) = hits.most_common(2)
    return best if most >= 2 and most > second and most * 20 >= len(words) else "unknown"


def kind_of(text: str) -> str:
    """`json`, `code`, `numbers` or `prose`."""
    head = text.strip()
    if head[:1] in {"{", "["}:
        try:
            msgspec.json.decode(head)
        except msgspec.DecodeError:
            pass
        else:
            return "json"
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and len(_CODE.findall(text)) * 4 >= len(lines):
        return "code"
    digits = sum(character.isdigit() for character in text)
    letters = sum(character.isalpha() for character in text)
    return "numbers" if digits > letters else "prose"


def num_words(text: str, language: str) -> int:
    """What blanks part; for scripts without blanks every letter is one."""
    if language in _NO_BLANKS:
        return sum(character.isalpha() for character in text)
    return len(text.split())
