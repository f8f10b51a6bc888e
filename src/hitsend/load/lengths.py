"""How long things are: a fixed number of tokens, or one drawn from a distribution.

Enters: what a flag says (`128`, `uniform:64,256`, `normal:200,50,16,512`, `lognormal:200,0.6`). Leaves: whole
numbers of tokens. Always true: a draw lies within `least` and `most`; a seed draws the same again. Next: `arrivals.py`.
"""

import math
import random
from typing import Literal

import msgspec

from hitsend.core.errors import ConfigError

MOST_TOKENS = 10_000_000
REDRAWS = 20
"""A draw outside the bounds is drawn again so often; after that the nearest bound stands for it."""

_FORMS = "N, uniform:LEAST,MOST, normal:MEAN,SD[,LEAST,MOST] or lognormal:MEDIAN,SIGMA[,LEAST,MOST]"


def dice(seed: int, *parts: object) -> random.Random:
    """Chance that depends on the seed and on what it is for, and on nothing that ran before."""
    return random.Random("/".join(map(str, (seed, *parts))))  # noqa: S311  # a load must repeat; nothing here is secret


class Length(msgspec.Struct, frozen=True):
    """`a` and `b`: fixed: the number; uniform: from, to; normal: mean, standard deviation; lognormal: median, sigma."""

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    a: float
    b: float = 0.0
    least: int = 1
    most: int = MOST_TOKENS

    def draw(self, chance: random.Random) -> int:
        """Tokens, at least `least` and at most `most`."""
        for _ in range(REDRAWS):
            drawn = round(self._once(chance))
            if self.least <= drawn <= self.most:
                return drawn
        return min(self.most, max(self.least, round(self.a)))

    def _once(self, chance: random.Random) -> float:
        match self.kind:
            case "fixed":
                return self.a
            case "uniform":
                return chance.randint(int(self.a), int(self.b))
            case "normal":
                return chance.gauss(self.a, self.b)
            case "lognormal":
                return math.exp(min(50.0, chance.gauss(math.log(self.a), self.b)))

    def scaled(self, factor: float) -> "Length":
        """As long as `factor` times this; sigma of a lognormal has no unit and stays."""
        b = self.b if self.kind == "lognormal" else self.b * factor
        whole = self.kind in ("fixed", "uniform")
        a = max(1.0, round(self.a * factor)) if whole else self.a * factor
        b = max(a, round(b)) if self.kind == "uniform" else b
        most = self.most if self.most == MOST_TOKENS else max(1, round(self.most * factor))
        return Length(self.kind, a, b, min(most, max(1, round(self.least * factor))), most)

    def said(self) -> str:
        """As the flag would say it."""
        if self.kind == "fixed":
            return f"{self.a:g}"
        bounds = "" if self.kind == "uniform" else f",{self.least}"
        bounds += f",{self.most}" if bounds and self.most != MOST_TOKENS else ""
        return f"{self.kind}:{self.a:g},{self.b:g}{bounds}"


def fixed(tokens: int) -> Length:
    """Always the same."""
    return Length("fixed", tokens)


def read_length(flag: str, text: str) -> Length:
    """What a flag says. Raises ConfigError naming the flag, what was given and what would do."""
    kind, colon, rest = text.partition(":")
    try:
        numbers = [float(part) for part in (rest if colon else text).split(",")]
    except ValueError:
        raise ConfigError(f"flag {flag}={text}: it must be {_FORMS}") from None
    if not all(math.isfinite(number) and 0 <= number <= MOST_TOKENS for number in numbers):
        raise ConfigError(f"flag {flag}={text}: each number must be from 0 to {MOST_TOKENS}")
    if not colon:
        return fixed(_whole(flag, text, numbers))
    length = _distribution(flag, text, kind, numbers)
    if length.least > length.most:
        raise ConfigError(f"flag {flag}={text}: the least, {length.least}, is more than the most, {length.most}")
    return length


def _whole(flag: str, text: str, numbers: list[float]) -> int:
    if len(numbers) != 1 or numbers[0] != int(numbers[0]) or numbers[0] < 1:
        raise ConfigError(f"flag {flag}={text}: it must be {_FORMS}; a number of tokens is whole and at least 1")
    return int(numbers[0])


def _distribution(flag: str, text: str, kind: str, numbers: list[float]) -> Length:
    count = len(numbers)
    if kind == "uniform" and count == 2:
        a, b = (int(number) for number in numbers)
        if not 1 <= a <= b:
            raise ConfigError(f"flag {flag}={text}: 1 <= LEAST <= MOST doesn't hold")
        return Length("uniform", a, b, a, b)
    if kind in ("normal", "lognormal") and count in (2, 3, 4):
        if numbers[0] < 1:
            raise ConfigError(f"flag {flag}={text}: the {'mean' if kind == 'normal' else 'median'} must be at least 1")
        bounds = [max(1, int(number)) for number in numbers[2:]]
        least, most = [*bounds, *[1, MOST_TOKENS][len(bounds) :]]
        return Length("normal" if kind == "normal" else "lognormal", numbers[0], numbers[1], least, most)
    raise ConfigError(f"flag {flag}={text}: it must be {_FORMS}")
