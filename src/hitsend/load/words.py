"""Text of a given number of tokens.

Enters: what a target's `/tokenize` or its usage says of a few probes. Leaves: a `Vocabulary`. Always true: where every
word is one token by the target's own count, lengths are exact, else they are an estimate and say so; a text is new each
time, from its first word on, unless the workload shares it. Next: `workload.py`.
"""

import random

import msgspec

_PLAIN = (
    "river stone cloud market garden letter engine window forest copper silver water light house paper music "
    "table green north south east west winter summer spring morning night island mountain valley bridge road "
    "train ship plane horse bird fish tree flower grass field farm town city village street church school book "
    "page story word number line circle square point color red blue white black brown yellow orange gold iron "
    "glass wood cotton bread milk butter salt sugar coffee apple fruit meat rice corn plate cup knife chair bed "
    "door wall floor roof room kitchen office factory bank shop store price money trade tax law court king queen "
    "doctor teacher student worker farmer soldier sailor artist writer driver friend brother sister mother father"
)
WORDS = tuple(_PLAIN.split())
"""Plain words that most vocabularies have as one token with a space in front."""

FEWEST = 16
"""Words that must be one token each for a vocabulary to be exact."""
CANDIDATES = WORDS[:24]
"""Words that are looked at for the beginning of a text, where no space is in front."""
PROBES = (8, 72)
"""Words in the two probes by which an estimate is calibrated."""


class Vocabulary(msgspec.Struct, frozen=True):
    """`overhead`: tokens that the template adds around the messages of a first turn. `is_exact`: by the target's own
    tokenizer; else by its usage, a line through two probes. `openings`: the words that a text may begin with."""

    words: tuple[str, ...] = WORDS
    openings: tuple[str, ...] = WORDS
    tokens_per_word: float = 1.0
    overhead: int = 0
    is_exact: bool = False

    def num_words(self, tokens: float) -> int:
        """Words that make so many tokens; at least one."""
        return max(1, round(tokens / self.tokens_per_word))

    def write(self, chance: random.Random, tokens: float) -> str:
        """So many tokens of words."""
        rest = chance.choices(self.words, k=self.num_words(tokens) - 1)
        return " ".join([chance.choice(self.openings), *rest])


def calibrated(small: int, large: int) -> tuple[float, int]:
    """Tokens per word, and tokens around the words, from the prompt tokens that two probes of `PROBES` words had."""
    slope = max(0.1, (large - small) / (PROBES[1] - PROBES[0]))
    return slope, max(0, round(small - PROBES[0] * slope))
