"""How long an engine's steps take, found in flight records: the exact form of a calibration.

Enters: records as `/inspect/requests/ID` shows them. Leaves: each step with what it computed and how long it took, and
out of many steps a `Calibration`: step times, how answers repeat themselves, what the edge adds. Always true: only
steps all of whose parts are known count; what a step computes is told as the engine cuts it into calls; constants are
fitted to relative errors and then scaled so that all steps together take what they took. Next: `timing.py`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.fit import fit_terms
from hitsend.plan.timing import MeasuredTiming, Work, parts_of

KIND, VERSION = "hitsend.timing", 2
SAME_S = 0.05
"""Steps of one number that began further apart are two engines' steps."""
MAX_FITTED = 3000
PIECE = 64
"""The engine cuts prompts at multiples of so many tokens."""
FEWEST = 30
WITHIN = (0.16, 0.84)
"""Between these shares of a normal distribution lie two standard deviations; steps that stood still don't count."""
NOTICED = 5
"""Tokens until a repeat is noticed and drafted for: three equal ones, and guesses that were right."""


TOGETHER_MS, EACH_MS = 5.0, 0.3
"""Requests nearer together than the first came at once; the second is assumed to lie between two where none did."""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """How answers repeat themselves: the chance per token that a repeat begins, and that it ends."""

    enter: float = 0.0
    leave: float = 1.0


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds around the engine: of a request until it is there, at least from one to the next, and back."""

    each_ms: float = 0.0
    before_ms: float = 0.0
    after_ms: float = 0.0


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's slots and cells. `drafts`: whether it guesses ahead from answers' own text."""

    slots: int
    cells_per_slot: int
    cells: int
    drafts: bool = False


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulator needs of one engine. `error`: median relative error of its `steps`; `spread`: what of a step's
    time differs from step to step, as a standard deviation, relative."""

    kind: str = KIND
    version: int = VERSION
    timing: MeasuredTiming
    answers: Answers = Answers()
    edge: Edge = Edge()
    room: Room | None = None
    steps: int = 0
    error: float = 0.0
    spread: float = 0.0


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `start_s`: on the server's clock; `between_s`: until the next one, where somebody went on."""

    start_s: float
    seconds: float
    work: Work
    between_s: float | None = None


class _Part(msgspec.Struct, frozen=True):
    """One request's part in a step. `held`: tokens in its cache before."""

    prefill: int
    decode: int
    drafted: int
    held: int
    copied: int


class _Seated(msgspec.Struct, frozen=True):
    """Who takes part in a step. `slot`: where it was put just before; None: it was there already."""

    request_id: str
    slot: int | None
    is_last: bool


class _Step:
    """A step while its parts are collected."""

    def __init__(self, event: Mapping[str, Any], start_s: float) -> None:
        self.start_s = start_s
        self.seconds = (event["ended_ms"] - event["started_ms"]) / 1e3
        self.totals = tuple(event[f"batch_{name}"] for name in ("prefill_tokens", "decode_tokens", "sequences"))
        self.parts: list[_Part] = []
        self.seated: list[_Seated] = []
        self.moved = 0
        self.between_s: float | None = None

    def observed(self) -> Observed | None:
        """None where a part is missing."""
        parts = self.parts
        found = sum(one.prefill for one in parts), sum(one.decode for one in parts), len(parts)
        if found != self.totals or self.seconds <= 0:
            return None
        prompts = [one for one in parts if one.prefill]
        decodes = [one for one in parts if not one.prefill]
        work = Work(
            decodes=len(decodes),
            drafted=sum(one.drafted for one in decodes),
            held=sum(attended(one.held, 1 + one.drafted) for one in decodes),
            passes=len({one.drafted for one in decodes}),
            pieces=calls_of((one.held, one.prefill) for one in prompts),
            prefill=found[0],
            attended=sum(attended(one.held, one.prefill) for one in prompts),
            copied=sum(one.copied for one in parts),
            moved=self.moved,
        )
        return Observed(start_s=self.start_s, seconds=self.seconds, work=work, between_s=self.between_s)


def attended(held: int, tokens: int) -> int:
    """Cells that so many tokens behind `held` others read: each all before it, and its own."""
    return tokens * held + tokens * (tokens + 1) // 2


def calls_of(prompts: Iterable[tuple[int, int]]) -> int:
    """Calls of the model for prompts' parts of one step, each (tokens before it, its tokens): as the engine cuts them
    (`serve/engine/calls.py`), up to a multiple of `PIECE`, whole multiples, the rest; equal ones go together."""
    return len({cut for before, tokens in prompts for cut in enumerate(_cuts(before, tokens))})


def _cuts(before: int, tokens: int) -> Iterator[int]:
    while tokens:
        over, whole = before % PIECE, tokens - tokens % PIECE or tokens
        size = PIECE - over if over and tokens >= PIECE else whole
        yield size
        before, tokens = before + size, tokens - size


def steps_of(records: Iterable[Mapping[str, Any]]) -> list[Observed]:
    """All whole steps, by time. Requests of several choices don't tell who computed what: their steps don't count."""
    known: dict[tuple[Any, int], list[_Step]] = {}
    for record in records:
        _add(record, known)
    steps = sorted((step for steps in known.values() for step in steps), key=lambda step: step.start_s)
    _count_moves(steps)
    return [one for step in steps if (one := step.observed()) is not None]


def _count_moves(steps: Sequence[_Step]) -> None:
    """As the loop closes gaps (`serve/loop/gaps.py`): whoever has the highest slot goes to the lowest free one between
    those of a step. Records tell only where a sequence was put first."""
    where: dict[str, int] = {}
    for step in steps:
        where |= {one.request_id: one.slot for one in step.seated if one.slot is not None}
        present = {where[one.request_id]: one.request_id for one in step.seated if one.request_id in where}
        for gap in range(min(present, default=0), max(present, default=0)):
            if gap < (last := max(present)) and gap not in where.values():
                present[gap] = present.pop(last)
                where[present[gap]] = gap
                step.moved += 1
        for one in step.seated:
            if one.is_last:
                where.pop(one.request_id, None)


def _add(record: Mapping[str, Any], known: dict[tuple[Any, int], list[_Step]]) -> None:
    # what is computed again after a preemption isn't told apart
    events = list(takewhile(lambda one: one["type"] != "preempted", record["events"]))
    matched = [one for one in events if one["type"] == "prefix_matched"]
    if len({one["choice"] for one in events if one["type"] == "admitted"}) != 1:
        return
    held = sum(one["cached_tokens"] for one in matched)
    copied = sum(one["cached_tokens"] for one in matched if one["source"] in ("saved", "sibling"))
    before: _Step | None = None
    last: Mapping[str, Any] = {}
    slot = next((one.get("slot") for one in events if one["type"] == "admitted"), None)
    end = max((one["step"] for one in events if one["type"] == "step"), default=0)
    for event in events:
        if event["type"] != "step":
            continue
        step = _step_of(event, record, known)
        proposed = sum(one["proposed"] for one in event["drafts"])
        step.parts.append(_Part(event["prefill_tokens"], event["decode_tokens"], proposed, held, copied))
        step.seated.append(_Seated(record["request_id"], slot if before is None else None, event["step"] == end))
        held, copied = held + event["prefill_tokens"] + event["decode_tokens"], 0
        if before is not None and event["step"] == last["step"] + 1:
            before.between_s = (event["started_ms"] - last["ended_ms"]) / 1e3
        before, last = step, event


def _step_of(event: Mapping[str, Any], record: Mapping[str, Any], known: dict[tuple[Any, int], list[_Step]]) -> _Step:
    start_s = record["received_at"] + event["started_ms"] / 1e3
    same = known.setdefault((record["engine"], event["step"]), [])
    for step in same:
        if abs(step.start_s - start_s) < SAME_S:
            return step
    same.append(_Step(event, start_s))
    return same[-1]


def calibrated(records: Sequence[Mapping[str, Any]], *, after_ms: float = 0.0) -> Calibration:
    """Raises ConfigError where too few whole steps are in them."""
    steps = steps_of(records)
    if len(steps) < FEWEST:
        raise ConfigError(
            f"step times need {FEWEST} steps whose requests are all known, these records have {len(steps)}"
        )
    timing = fit_steps(steps)
    ratios = sorted(one.seconds / seconds_of(timing, one.work) for one in steps)
    low, high = (ratios[int(len(ratios) * share)] for share in WITHIN)
    return Calibration(
        timing=timing,
        answers=answers_of(records),
        edge=edge_of(records, after_ms=after_ms),
        steps=len(steps),
        error=median(abs(1 / ratio - 1) for ratio in ratios),
        spread=(high - low) / 2,
    )


def seconds_of(timing: MeasuredTiming, work: Work) -> float:
    """A step, and what is brought before it."""
    return timing.step_s(work) + timing.copy_s(work.copied)


def fit_steps(steps: Sequence[Observed]) -> MeasuredTiming:
    """Least relative errors, none below 0, then all scaled alike: the sum is what a throughput is made of."""
    chosen = steps[:: max(1, len(steps) // MAX_FITTED)]
    rows = [parts_of(one.work) | {"copied": one.work.copied / 1e3} for one in chosen]
    found = fit_terms(rows, [one.seconds * 1e3 for one in chosen])
    needed = {"step_ms": 0.0, "prefill_ms": 0.0, "decode_ms": 0.0}
    timing = MeasuredTiming(**needed | {f"{name}_ms": value for name, value in found.items()})
    timing = timing.stretched(sum(one.seconds for one in steps) / sum(seconds_of(timing, one.work) for one in steps))
    between = [one.between_s for one in steps if one.between_s is not None]
    return msgspec.structs.replace(timing, between_ms=mean(between) * 1e3 if between else 0.0)


def answers_of(records: Iterable[Mapping[str, Any]]) -> Answers:
    """From drafts: what was right went on, what was wrong ended a repeat, and each first draft followed a beginning."""
    plain, entered, right, wrong = 0, 0, 0, 0
    for record in records:
        was_drafted = False
        for event in record["events"]:
            if event["type"] != "step" or not event["decode_tokens"] or event["batch_prefill_tokens"]:
                continue
            drafts = event["drafts"]
            right += sum(one["accepted"] for one in drafts)
            wrong += sum(one["accepted"] < one["proposed"] for one in drafts)
            entered += bool(drafts) and not was_drafted
            plain += not drafts
            was_drafted = bool(drafts)
    if not entered:
        return Answers()
    return Answers(
        enter=min(1.0, entered / max(entered, plain - NOTICED * entered)), leave=wrong / max(1, right + wrong)
    )


def edge_of(records: Iterable[Mapping[str, Any]], *, after_ms: float = 0.0) -> Edge:
    """From arrival to the engine: the hold is the last thing before it. The way back isn't in a record."""
    entries, instants = [], []
    for record in records:
        found = [one["at_ms"] for one in record["events"] if one["type"] == "reserved"][-1:]
        entries += found
        instants += [record["received_at"] * 1e3 + at_ms for at_ms in found]
    instants.sort()
    apart = [later - sooner for sooner, later in pairwise(instants) if later - sooner < TOGETHER_MS]
    return Edge(
        before_ms=median(entries) if entries else 0.0, each_ms=median(apart) if apart else EACH_MS, after_ms=after_ms
    )


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError with the file and what is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"--timing {path}: {error}") from None
    if (found.kind, found.version) != (KIND, VERSION):
        raise ConfigError(
            f"--timing {path}: kind is {found.kind!r}, version {found.version}, needed is {KIND!r}, {VERSION}"
        )
    return found
