"""What this machine is good at: ways to run a model measured beside each other, remembered, and chosen from.

Enters: a model file and settings. Leaves: a `Tuned` (measured, or from an earlier time) and its choice. Always true: a
choice is a layout whose loss of perplexity plus its standard error is within the bound and whose gain is at least
`LEAST_GAIN`, the smallest of those that are nearly as fast as the fastest, else as shipped; a result counts for the
same machine, file, build and settings only; measuring happens in child processes, each way in turn and all of them
again, so that a slow moment makes no gain. Next: `weights.py`.
"""

import hashlib
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hitsend.core.clock import Clock, SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.convert import RECIPES, NoRoom
from hitsend.serve.engine.layouts import (
    AS_SHIPPED,
    Say,
    converted,
    discard,
    layouts_dir,
    measuring_alone,
    sha256_of,
)
from hitsend.serve.engine.libllama import PACKAGE_VERSION
from hitsend.serve.engine.loading import num_cores
from hitsend.serve.engine.measure import WIDTHS, Answer, Question
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.patience import Patience
from hitsend.settings import EngineSettings

LEAST_ALONE = 1.03
"""One thread has to be so many times as fast as all of them to be taken for steps of one token."""

LEAST_GAIN = 1.05
"""A smaller gain is within what measuring scatters, and not worth a second copy of the weights."""

EDITION = 3
"""Counts up when results of before can't be compared: other held texts, another way of measuring."""

DISTURBED = 1.3
"""So many times apart the same way isn't within one turn on a machine that nobody else uses."""

_INPUT, _OUTPUT = 128, 64
"""The request that a gain is computed for."""

_BUSY = 0.5
"""Processes that want to run, for each core, above which a measurement is of them too."""

_QUICK_WINDOWS = 4

BOUND_S = 1800.0
"""Measuring takes at most about so long, however large the model is."""

_TIMEOUT_S = 1800.0


class Way(msgspec.Struct, frozen=True):
    """How to run a model."""

    layout: str = AS_SHIPPED
    kv_type: str = "f16"
    num_threads: int = 1
    micro_batch: int = 512


class Measured(msgspec.Struct, frozen=True):
    """A way and its figures: tokens per second; `loss` and `loss_error` are shares of perplexity against as shipped,
    None where not measured (threads and micro-batch change no weights). `alone`: of one sequence on one thread. `gain`
    is against the first row over all widths, `gains` by width: 128 tokens in and 64 out, that many at once."""

    way: Way
    prefill: float
    decode: dict[int, float]
    loss: float | None
    loss_error: float | None
    weights_bytes: int
    peak_bytes: int
    gain: float = 1.0
    gains: dict[int, float] = {}
    alone: float = 0.0

    @property
    def num_threads_alone(self) -> int:
        """What `engine.num_threads_alone` should be: one where that is faster, else as all others."""
        return 1 if self.alone >= LEAST_ALONE * self.decode[1] else 0

    def gain_up_to(self, num_slots: int) -> float:
        """Over the widths that this many slots can have."""
        return _together(gain for width, gain in self.gains.items() if width <= num_slots) or self.gain

    def is_within(self, bound: float) -> bool:
        """Whether its loss is known to be small enough."""
        return self.loss is not None and self.loss + (self.loss_error or 0.0) <= bound


class Tuned(msgspec.Struct, frozen=True):
    """All that was measured of one model on one machine. `perplexity` is that of the weights as shipped."""

    model: str
    machine: str
    build: str
    perplexity: float
    num_windows: int
    rows: tuple[Measured, ...]

    def choice(self, bound: float, num_slots: int = max(WIDTHS)) -> Measured:
        """The fastest layout for up to so many that keeps to the bound, if its gain is real; else as shipped. Of those
        that are within what measuring scatters, the smallest."""
        shipped = self.rows[0]
        usable = [row for row in self.rows if row.is_within(bound) and row.way.kv_type == shipped.way.kv_type]
        real = [row for row in usable if row.gain_up_to(num_slots) >= LEAST_GAIN]
        most = max((row.gain_up_to(num_slots) for row in real), default=0.0)
        near = [row for row in real if row.gain_up_to(num_slots) * LEAST_GAIN >= most]
        return min(near, key=lambda row: row.weights_bytes, default=shipped)


def gains_of(row: Measured, base: Measured) -> dict[int, float]:
    """Output tokens per second against `base`, by width: 128 tokens in and 64 out, so many at once."""
    return {width: _seconds(base, width) / _seconds(row, width) for width in row.decode}


def steady_gains(way: Way, speeds: dict[Way, list[Answer]]) -> dict[int, float]:
    """Against the first way, by width: of the best figures, or in the middle turn, whichever is less.

    A neighbour that woke up while one of the two ran must not look like a gain.
    """
    base = next(iter(speeds.values()))
    turns = [
        gains_of(_measured(way, [mine], None, ()), _measured(way, [theirs], None, ()))
        for mine, theirs in zip(speeds[way], base, strict=True)
    ]
    best = gains_of(_measured(way, speeds[way], None, ()), _measured(way, base, None, ()))
    return {width: min(gain, statistics.median(turn[width] for turn in turns)) for width, gain in best.items()}


def steady_gain(way: Way, speeds: dict[Way, list[Answer]]) -> float:
    """The same over all widths."""
    return _together(steady_gains(way, speeds).values())


def _together(gains: Iterable[float]) -> float:
    """Of several: how much less time an equal share of each takes. 0: there are none."""
    found = list(gains)
    return statistics.harmonic_mean(found) if found else 0.0


def _seconds(row: Measured, width: int) -> float:
    speed = max(row.decode[1], row.alone) if width == 1 else row.decode[width]
    return width * (_INPUT / row.prefill + _OUTPUT / speed)


def tuned_file(found: ModelFile, models_dir: Path, settings: EngineSettings) -> Path:
    """Where the result for this model, machine and build is kept."""
    sha256 = sha256_of(Path(found.path), layouts_dir(models_dir))
    mark = (sha256, machine(), *_build(settings), settings.num_threads, settings.kv_type, EDITION)
    return layouts_dir(models_dir) / f"tuned-{hashlib.sha256(repr(mark).encode()).hexdigest()[:32]}.json"


def _build(settings: EngineSettings) -> tuple[str, ...]:
    """What computes."""
    return (settings.libllama or PACKAGE_VERSION, *([settings.blas] if settings.blas else []))


def remembered(found: ModelFile, models_dir: Path, settings: EngineSettings) -> Tuned | None:
    """What was measured before; None where nothing was, or nothing that counts here."""
    try:
        return msgspec.json.decode(tuned_file(found, models_dir, settings).read_bytes(), type=Tuned)
    except (ConfigError, OSError, msgspec.DecodeError):
        return None


def tune(
    found: ModelFile,
    models_dir: Path,
    settings: EngineSettings,
    *,
    is_quick: bool,
    say: Say,
    bound_s: float = BOUND_S,
    clock: Clock = SystemClock(),  # noqa: B008  # it keeps nothing
) -> Tuned:
    """Measure and remember. Takes minutes, at most about `bound_s` after converting. Raises ConfigError."""
    with measuring_alone(models_dir, say):
        return tuned_now(found, models_dir, settings, Patience(say, clock, bound_s), is_quick=is_quick, say=say)


def tuned_now(
    found: ModelFile, models_dir: Path, settings: EngineSettings, patience: Patience, *, is_quick: bool, say: Say
) -> Tuned:
    """The same, for whoever measures alone already."""
    source, threads = Path(found.path), settings.num_threads or num_cores()
    if os.getloadavg()[0] > _BUSY * num_cores():
        say(f"this machine is busy (load {os.getloadavg()[0]:.1f}, {num_cores()} cores): speeds will be of the moment")
    files, is_whole = _files(source, models_dir, settings, say)
    ways = _ways(tuple(files), threads, settings.kv_type, is_quick=is_quick)
    speeds = _speeds(ways, files, settings, patience, turns=3 if is_quick else 5, say=say)
    losses = _losses(ways, files, settings, patience, speeds, is_quick=is_quick)
    rows = [_measured(way, speeds[way], losses.get(way), losses[ways[0]]) for way in ways]
    rows = [
        msgspec.structs.replace(row, gain=steady_gain(row.way, speeds), gains=steady_gains(row.way, speeds))
        for row in rows
    ]
    perplexity = math.exp(statistics.fmean(losses[ways[0]]))
    build = " + ".join(_build(settings))
    result = Tuned(found.name, machine(), build, perplexity, len(losses[ways[0]]), tuple(rows))
    tidy(result, source, models_dir, settings)  # first: it makes room
    if is_whole:
        remember(result, tuned_file(found, models_dir, settings), say)
    else:
        say("what was measured is not remembered: for some layouts there was no room")
    return result


def remember(result: Tuned, target: Path, say: Say) -> None:
    """For the next start. Where that can't be, this one has its result all the same."""
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
        part.replace(target)
    except OSError as failure:
        part.unlink(missing_ok=True)
        say(f"what was measured is not remembered: {target.parent} can't be written: {failure.strerror}")


def _speeds(
    ways: list[Way], files: dict[str, Path], settings: EngineSettings, patience: Patience, *, turns: int, say: Say
) -> dict[Way, list[Answer]]:
    """Each way in turn, all of them again, as often as there is time.

    What all others are compared with is measured at both ends of a turn, and its better figures count: where something
    else ran at one of them, nothing may look like a gain because of that.
    """
    first = ways[0]
    speeds: dict[Way, list[Answer]] = {way: [] for way in ways}
    patience.begin(ways, turns)
    for turn in range(turns):
        if not patience.has_time_for(turn):
            break
        for number, way in enumerate(ways):
            patience.speed(turn, number, shown(way))
            speeds[way].append(_ask(files[way.layout], way, settings))
        patience.speed(turn, len(ways), shown(first))
        early, late = speeds[first][-1], _ask(files[first.layout], first, settings)
        if early.times_apart(late) > DISTURBED:
            say(
                f"something else ran here: {first.layout} made {early.prefill:.0f} and {late.prefill:.0f} tokens/s of "
                "prompts within one turn; the better figures count"
            )
        speeds[first][-1] = early.best_with(late)
    return speeds


def _losses(
    ways: list[Way],
    files: dict[str, Path],
    settings: EngineSettings,
    patience: Patience,
    speeds: dict[Way, list[Answer]],
    *,
    is_quick: bool,
) -> dict[Way, tuple[float, ...]]:
    """By window, of the ways that compute other numbers than the first one does; quickly: of those that gain."""
    first = ways[0]
    asked = [way for way in ways if (way.num_threads, way.micro_batch) == (first.num_threads, first.micro_batch)]
    if is_quick:
        gains = {way: max(steady_gains(way, speeds).values()) for way in asked}
        asked = [way for way in asked if way is first or gains[way] >= LEAST_GAIN]  # no other can be chosen
    prefills = [max(each.prefill for each in speeds[way]) for way in asked]
    windows = patience.every(prefills, _QUICK_WINDOWS if is_quick else 1)
    losses: dict[Way, tuple[float, ...]] = {}
    for number, way in enumerate(asked):
        patience.perplexity(number, prefills, windows, shown(way))
        losses[way] = _ask(files[way.layout], way, settings, windows=windows).losses
    return losses


def explained(result: Tuned, bound: float, num_slots: int = max(WIDTHS)) -> str:
    """What is chosen and why, for the log."""
    chosen = result.choice(bound, num_slots)
    alone = ", one thread for steps of one token" if chosen.num_threads_alone else ""
    if chosen is not result.rows[0]:
        assert chosen.loss is not None
        by_width = ", ".join(f"{gain:.2f} at {width}" for width, gain in chosen.gains.items())
        return (
            f"{chosen.way.layout}: {chosen.gain_up_to(num_slots):.2f} times the output of the weights as shipped"
            f"{f' ({by_width} at once)' if by_width else ''}, perplexity "
            f"{chosen.loss:+.2%} (± {chosen.loss_error or 0.0:.2%}), bound {bound:.2%}"
            f"{alone}"
        )
    others = [row for row in result.rows[1:] if row.way.layout != AS_SHIPPED]
    losses = ("" if row.loss is None else f" at {row.loss:+.2%}" for row in others)
    gains = (f"{row.way.layout} {row.gain_up_to(num_slots):.2f} times" for row in others)
    tried = ", ".join(gain + loss for gain, loss in zip(gains, losses, strict=True)) or "nothing to try"
    return f"as shipped: nothing gains {LEAST_GAIN:g} times within a loss of {bound:.2%} ({tried}){alone}"


def shown(way: Way) -> str:
    """In a few words."""
    return f"{way.layout}, KV {way.kv_type}, {way.num_threads} threads, micro-batch {way.micro_batch}"


def machine() -> str:
    """The processor and how many cores of it are ours."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text("utf-8", "replace").splitlines()
        told = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags"))]
        digest = hashlib.sha256("".join(told[1:2]).encode()).hexdigest()[:8]
        name = f"{told[0] if told else name} ({digest})"
    return f"{name}, {num_cores()} cores"


def _files(source: Path, models_dir: Path, settings: EngineSettings, say: Say) -> tuple[dict[str, Path], bool]:
    """By layout, without those that change nothing in this model; and whether there was room for all. Raises NoRoom
    where there was for none."""
    files, lacking = {AS_SHIPPED: source}, []
    for recipe in RECIPES:
        try:
            files[recipe] = converted(source, models_dir, recipe, libllama=settings.libllama, say=say)
        except ConfigError as failure:
            say(f"layout {recipe}: left out: {failure}")
            lacking += [failure] if isinstance(failure, NoRoom) else []
    if lacking and len(files) == 1:
        raise lacking[0]
    return files, not lacking


def _ways(layouts: tuple[str, ...], threads: int, kv_type: str, *, is_quick: bool) -> list[Way]:
    ways = [Way(layout, kv_type, threads) for layout in layouts]
    if not is_quick:
        ways.append(Way(kv_type="q8_0" if kv_type == "f16" else "f16", num_threads=threads))
        ways.append(Way(kv_type=kv_type, num_threads=threads, micro_batch=128))
        ways += [Way(kv_type=kv_type, num_threads=fewer) for fewer in (threads // 2,) if fewer]
    return ways


def _ask(file: Path, way: Way, settings: EngineSettings, *, windows: int = 0) -> Answer:
    library, blas = settings.libllama, settings.blas
    question = Question(str(file), library, way.num_threads, way.kv_type, way.micro_batch, windows, blas)
    words = ["-m", "hitsend.serve.engine.measure", msgspec.json.encode(question).decode()]
    try:
        child = subprocess.run(  # noqa: S603 (our own module)
            [sys.executable, *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"measuring {shown(way)} took longer than {_TIMEOUT_S:g} s") from None
    if child.returncode != 0:
        said = child.stderr.strip().splitlines()
        raise ConfigError(f"measuring {shown(way)} failed: {said[-1] if said else child.returncode}")
    return msgspec.json.decode(child.stdout, type=Answer)


def _measured(way: Way, speeds: list[Answer], losses: tuple[float, ...] | None, base: tuple[float, ...]) -> Measured:
    decode = {width: max(each.decode[width] for each in speeds) for width in speeds[0].decode}
    loss, error = (None, None) if losses is None else loss_of(losses, base)
    return Measured(
        way,
        max(each.prefill for each in speeds),
        decode,
        loss,
        error,
        speeds[0].weights_bytes,
        max(each.peak_bytes for each in speeds),
        alone=max(each.alone for each in speeds),
    )


def loss_of(losses: tuple[float, ...], base: tuple[float, ...]) -> tuple[float, float]:
    """By which share perplexity is higher than `base`, and its standard error, from differences by window."""
    apart = [mine - theirs for mine, theirs in zip(losses, base, strict=True)]
    loss = math.expm1(statistics.fmean(apart))
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
    return loss, (1 + loss) * error


def tidy(result: Tuned, source: Path, models_dir: Path, settings: EngineSettings) -> None:
    """Only the chosen copy stays."""
    chosen = result.choice(settings.layout_max_loss, settings.num_slots).way.layout
    for recipe in RECIPES:
        if recipe != chosen:
            discard(source, models_dir, recipe)
