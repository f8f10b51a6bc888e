"""Requests to simulate: made from a distribution, or read from a recorded trace.

Enters: lengths and a rate, or JSON Lines. Leaves: `Arrival`s by time. Always true: the same seed makes the same
requests; another rate of the same traffic is the same requests nearer together. Next: `fleet.py`.
"""

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hitsend.core.errors import ConfigError

MAX_TOKENS = 1_000_000


class Arrival(msgspec.Struct, frozen=True):
    """One request: seconds, and tokens. `shared`: the part of the prompt that all requests begin with.

    Turns of one `conversation` follow each other: a later one comes when the one before is answered, whatever its
    `at_s`, and begins with `repeated` tokens of that one's prompt and answer. `prompt_ids`, `output_ids`: what was
    said, where that is known, so that what can be guessed ahead of an answer is what could be.
    """

    at_s: float
    input: int
    output: int
    shared: int = 0
    conversation: str | None = None
    repeated: int = 0
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Lognormal lengths around a median, independent arrivals. `spread` 0: all alike (sigma of the logarithm)."""

    input: int = 1200
    output: int = 400
    spread: float = 0.5
    shared: int = 0

    def check(self) -> None:
        """Raises ConfigError that names the flag."""
        for name, value in (("--input", self.input), ("--output", self.output)):
            if not 1 <= value <= MAX_TOKENS:
                raise ConfigError(f"{name} is {value}, needed is 1 to {MAX_TOKENS:,}")
        if not 0 <= self.spread <= 2:
            raise ConfigError(f"--spread is {self.spread}, needed is 0 to 2")
        if not 0 <= self.shared < self.input:
            raise ConfigError(f"--shared is {self.shared}, needed is 0 to below --input {self.input}")


def make_arrivals(traffic: Traffic, requests: int, seed: int) -> list[Arrival]:
    """At one request a second on average; `at_rate` brings them nearer. Lengths are at most 4 x their median."""
    traffic.check()
    # draws to simulate with, nothing secret
    rng = random.Random(seed)  # noqa: S311
    found, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(1.0)
        entry, leave = (_length(rng, median, traffic.spread) for median in (traffic.input, traffic.output))
        found.append(Arrival(now, max(entry, traffic.shared + 1), leave, traffic.shared))
    return found


def _length(rng: random.Random, median: int, spread: float) -> int:
    return max(1, min(4 * median, round(median * rng.lognormvariate(0.0, spread)))) if spread else median


def at_rate(arrivals: Sequence[Arrival], per_s: float) -> list[Arrival]:
    """The same requests, so many a second on average."""
    factor = rate_of(arrivals) / per_s
    return [msgspec.structs.replace(one, at_s=one.at_s * factor) for one in arrivals]


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Requests a second, from the first instant to the last."""
    return len(arrivals) / max(1e-9, arrivals[-1].at_s)


class _Line(msgspec.Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    at_s: float | None = None
    cached_tokens: int = 0
    conversation: str | int | None = None
    repeated_tokens: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, is_timed: bool = True) -> list[Arrival]:
    """JSON Lines with `at_s`, `input_tokens`, `output_tokens`, perhaps `cached_tokens`, `conversation`,
    `repeated_tokens`, `prompt_token_ids` and `output_token_ids`. Where `is_timed` is false, `at_s` doesn't matter.
    Raises ConfigError with the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    begun: dict[str, float] = {}
    found = [
        _arrival(f"--trace {path}, line {number}", line, begun, is_timed=is_timed)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if len(found) < 2:
        raise ConfigError(f"--trace {path}: needed are two requests or more")
    if not is_timed:
        return found
    first = min(one.at_s for one in found)
    moved = [msgspec.structs.replace(one, at_s=one.at_s - first) for one in found]
    return sorted(moved, key=lambda one: one.at_s)


def _arrival(where: str, line: bytes, begun: dict[str, float], *, is_timed: bool) -> Arrival:
    try:
        told = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{where}: {error}") from None
    name = None if told.conversation is None else str(told.conversation)
    is_later = name in begun
    at_s = told.at_s if name is None else begun.get(name, told.at_s)
    if is_timed and (at_s is None or not 0 <= at_s < math.inf):
        raise ConfigError(f"{where}: at_s is {at_s}, needed are seconds from 0")
    for key, value in (("input_tokens", told.input_tokens), ("output_tokens", told.output_tokens)):
        if not 1 <= value <= MAX_TOKENS:
            raise ConfigError(f"{where}: {key} is {value}, tokens must be 1 to {MAX_TOKENS:,}")
    for key, value in (("cached_tokens", told.cached_tokens), ("repeated_tokens", told.repeated_tokens)):
        if not 0 <= value <= MAX_TOKENS:
            raise ConfigError(f"{where}: {key} is {value}, needed is 0 to {MAX_TOKENS:,}")
    _check_ids(where, told)
    if name is not None:
        begun.setdefault(name, at_s or 0.0)
    # the last token of a prompt is nobody else's
    most = told.input_tokens - 1
    return Arrival(
        at_s or 0.0,
        told.input_tokens,
        told.output_tokens,
        min(told.cached_tokens, most),
        name,
        min(told.repeated_tokens, most) if is_later else 0,
        told.prompt_token_ids,
        told.output_token_ids,
    )


def _check_ids(where: str, told: _Line) -> None:
    """Both or neither, each as long as it is said to be."""
    ids = {"prompt_token_ids": told.prompt_token_ids, "output_token_ids": told.output_token_ids}
    for (key, found), needed in zip(ids.items(), (told.input_tokens, told.output_tokens), strict=True):
        if any(ids.values()) and len(found) != needed:
            raise ConfigError(f"{where}: {key} has {len(found)} tokens, needed are {needed}")
        if found and min(found) < 0:
            raise ConfigError(f"{where}: {key} has {min(found)}, needed are numbers from 0")
