"""The flags of `hitsend load`, and the plan that they make.

Enters: what was typed. Leaves: a `Plan`. Always true: a value that can't work is refused before anything is sent, with
its flag, the value and what would do; every plan is bounded; a key from the environment goes to `--url` only, never to
the servers that `--target` names. Next: `load.py`.
"""

import math
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.core.errors import ConfigError
from hitsend.load.arrivals import KINDS, MOST_REQUESTS, Kind
from hitsend.load.lengths import read_length
from hitsend.load.report import Slo
from hitsend.load.result import Plan
from hitsend.load.target import Target, check_url
from hitsend.load.trace import read_trace
from hitsend.load.workload import PRESETS, Endpoint, Recorded, Shape
from hitsend.settings_source import secret

MOST_LEVELS, MOST_CONCURRENCY, MOST_RATE, MOST_TARGETS = 64, 4096, 100_000.0, 16
DEFAULT_CONCURRENCY = (1, 8)
DEFAULT_DURATION_S = 30.0
DEFAULT_BURST = 8
MOST_SECONDS, MOST_SPEED = 86_400, 1_000_000.0
ROUNDS_OF_SEVERAL = 3

O = typer.Option  # noqa: E741  # one line per flag
Targets = Annotated[
    list[str] | None,
    O("--target", metavar="NAME=URL[,model=M][,key-env=VAR]", help="Several: compared, taking turns; the first is 1."),
]
Model = Annotated[str | None, O("--model", help="A model's name; default the server's first.")]
Concurrency = Annotated[str | None, O(metavar="N,N,...", help="Closed loop: so many requests at once. Default 1,8.")]
Rate = Annotated[str | None, O(metavar="R,R,...", help="Open loop: so many requests per second, answered or not.")]
RampTo = Annotated[str | None, O("--ramp", metavar="START:STOP", help="Open loop: doubling the rate to saturation.")]
Replay = Annotated[
    float | None, O("--replay", metavar="SPEED", help="Open loop: a trace's own times; 2 is twice as fast.")
]
Arrivals = Annotated[str | None, O(help=f"Of --rate and --ramp: {', '.join(KINDS)}. Default poisson.")]
Burst = Annotated[int | None, O("--burst-size", min=1, max=1000, help="Requests of one burst. Default 8.")]
Requests = Annotated[int | None, O(min=1, max=MOST_REQUESTS, help="Per level, at most.")]
Duration = Annotated[float | None, O(min=0.1, max=MOST_SECONDS, help="Seconds per level, at most. Default 30.")]
Warmup = Annotated[int, O(min=0, max=1000, help="Requests before the first level, counted nowhere.")]
Repeat = Annotated[int | None, O(min=1, max=100, help="Rounds. Default 1; 3 with several targets.")]
Preset = Annotated[
    str | None, O("--workload", help="customer-service (700 shared + 500 in, 400 out: the default) or chat (10 turns).")
]
Input = Annotated[str | None, O(metavar="LENGTH", help="Prompt tokens: N, uniform:A,B, normal:M,SD or lognormal:M,S.")]
Output = Annotated[str | None, O(metavar="LENGTH", help="Answer tokens, in the same form.")]
System = Annotated[int | None, O(min=0, max=1_000_000, help="Tokens of a system prompt that all requests share.")]
Turns = Annotated[int | None, O(min=1, max=100, help="Turns of each conversation; later ones carry the answers.")]
Trace = Annotated[Path | None, O(metavar="FILE", help="JSON Lines: lengths or request bodies, perhaps with at_s.")]
EndpointName = Annotated[str, O("--endpoint", help="chat or completions.")]
Abort = Annotated[float, O(min=0, max=1, help="Part of the requests that hang up in mid-answer.")]
Seed = Annotated[int, O(help="The same seed, the same requests at the same times.")]
Temperature = Annotated[float | None, O(min=0, max=2, help="0 always takes the likeliest.")]
Extra = Annotated[str | None, O(metavar="JSON", help="Fields for every request, over all others.")]
Think = Annotated[float, O("--think", min=0, max=3600, help="Seconds between an answer and the next turn.")]
Timeout = Annotated[float, O(min=0.1, max=86_400, help="Seconds that one request may take.")]
SloTtft = Annotated[str | None, O("--slo-ttft", metavar="MS", help="Goodput: first token within (500, 500ms, 2s).")]
SloTpot = Annotated[str | None, O("--slo-tpot", metavar="MS", help="Goodput: each further token within.")]
SloE2e = Annotated[str | None, O("--slo-e2e", metavar="MS", help="Goodput: last token within.")]
Fresh = Annotated[bool, O("--fresh-connections", help="A new connection for every request.")]
Note = Annotated[str | None, O(help="What only you know, such as the server's hardware: kept in the result.")]
Csv = Annotated[Path | None, O("--csv", metavar="FILE", help="One row per request.")]
Html = Annotated[Path | None, O("--html", metavar="FILE", help="The report as one page.")]


class Given(msgspec.Struct, frozen=True, kw_only=True):
    """The flags as they were typed. `is_key_typed`: by flag, not from the environment."""

    url: str
    key: str | None
    is_key_typed: bool
    target: list[str] | None
    model: str | None
    concurrency: str | None
    rate: str | None
    ramp: str | None
    replay: float | None
    arrivals: str | None
    burst_size: int | None
    requests: int | None
    duration: float | None
    warmup: int
    repeat: int | None
    workload: str | None
    input: str | None
    output: str | None
    system: int | None
    turns: int | None
    trace: Path | None
    endpoint: str
    abort: float
    seed: int
    temperature: float | None
    extra: str | None
    think: float
    timeout: float
    slo_ttft: str | None
    slo_tpot: str | None
    slo_e2e: str | None
    fresh_connections: bool


def make_plan(given: Given) -> Plan:
    """Raises ConfigError."""
    _check_finite(given)
    targets = _targets(given)
    trace = _trace(given)
    shape, is_scaled = _traced(given, trace) if trace else _shape(given)
    concurrency, rates, ramp, speed = _mode(given, trace)
    _check_end(given, trace, rates, speed)
    duration_s = given.duration if given.duration or given.requests or speed else DEFAULT_DURATION_S
    return Plan(
        targets=targets,
        shape=shape,
        is_scaled=is_scaled,
        trace=trace,
        concurrency=concurrency,
        rates=rates,
        ramp=ramp,
        replay_speed=speed,
        arrivals=_kind(given, is_drawn=bool(rates or ramp)),
        burst_size=given.burst_size or DEFAULT_BURST,
        requests=given.requests,
        duration_s=duration_s,
        warmup=given.warmup,
        rounds=given.repeat or (ROUNDS_OF_SEVERAL if len(targets) > 1 else 1),
        timeout_s=given.timeout,
        think_s=given.think,
        abort=given.abort,
        seed=given.seed,
        slo=Slo(*(_ms(f"--slo-{name}", getattr(given, f"slo_{name}")) for name in ("ttft", "tpot", "e2e"))),
        keeps_connections=not given.fresh_connections,
    )


def _check_finite(given: Given) -> None:
    """A NaN passes every comparison with a limit."""
    for name in given.__struct_fields__:
        value = getattr(given, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"flag --{name.replace('_', '-')}={value}: it must be a finite number")


def _kind(given: Given, *, is_drawn: bool) -> Kind:
    """Of what is sent at a rate; nothing else has arrivals that could be chosen."""
    text = given.arrivals or "poisson"
    kind = next((kind for kind in KINDS if kind == text), None)
    if kind is None:
        raise ConfigError(f"flag --arrivals={text}: it must be one of {', '.join(KINDS)}")
    if given.arrivals is not None and not is_drawn:
        raise ConfigError(f"flag --arrivals={text}: it is of --rate and --ramp only")
    if given.burst_size is not None and text != "bursts":
        raise ConfigError(f"flag --burst-size={given.burst_size}: it is of --arrivals bursts only")
    return kind


def _endpoint(text: str) -> Endpoint:
    if text == "chat":
        return "chat"
    if text == "completions":
        return "completions"
    raise ConfigError(f"flag --endpoint={text}: it must be chat or completions")


def _extra(text: str | None) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        raise ConfigError(f"flag --extra={text}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"flag --extra={text}: it must be a JSON object")
    if fields.get("stream", True) is not True:
        raise ConfigError("flag --extra: stream must stay true: the first token is timed")
    return fields


def _targets(given: Given) -> tuple[Target, ...]:
    common: dict[str, Any] = {
        "endpoint": _endpoint(given.endpoint),
        "temperature": given.temperature,
        "extra": _extra(given.extra),
    }
    if not given.target:
        url = check_url("--url", given.url)
        return (Target("server", url, given.model or "", given.key, **common),)
    if len(given.target) > MOST_TARGETS:
        raise ConfigError(f"flag --target: {len(given.target)} targets, at most {MOST_TARGETS}")
    typed = given.key if given.is_key_typed else None
    found = tuple(_target(text, given.model or "", typed, common) for text in given.target)
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"flag --target: {', '.join(names)}: each needs a name of its own")
    return found


def _target(text: str, model: str, key: str | None, common: dict[str, Any]) -> Target:
    shape = re.fullmatch(r"([^=,]+)=([^,]+)((?:,(?:model|key-env)=[^,]+)*)", text)
    if shape is None:
        raise ConfigError(f"flag --target={text}: it must be NAME=URL[,model=M][,key-env=VAR]")
    more = dict(part.split("=", 1) for part in shape[3].split(",")[1:])
    if "key-env" in more:
        key = secret(more["key-env"])
        if key is None:
            raise ConfigError(f"flag --target={text}: the environment has no {more['key-env']}")
    return Target(shape[1].strip(), check_url("--target", shape[2]), more.get("model", model), key, **common)


def _shape(given: Given) -> tuple[Shape, bool]:
    """The preset with what was typed over it. One with a length of its own is sent as it is, not scaled."""
    name = given.workload or "customer-service"
    if name not in PRESETS:
        raise ConfigError(f"flag --workload={name}: it must be one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    typed = (given.input, given.output, given.system)
    base = preset if given.workload or typed == (None, None, None) else msgspec.structs.replace(preset, system=0)
    shape = Shape(
        read_length("--input", given.input) if given.input else base.input,
        read_length("--output", given.output) if given.output else base.output,
        base.system if given.system is None else given.system,
        given.turns or base.turns,
    )
    if given.endpoint == "completions" and shape.turns > 1:
        raise ConfigError(f"flag --turns={shape.turns}: a completion has one turn; --endpoint chat has more")
    return shape, typed == (None, None, None)


def _traced(given: Given, trace: tuple[Recorded, ...]) -> tuple[Shape, bool]:
    """A trace says itself how long things are; a shared prompt comes on top of its lengths only where one is asked."""
    for name in ("workload", "input", "output", "turns"):
        if getattr(given, name) is not None:
            raise ConfigError(f"flag --{name}={getattr(given, name)}: with --trace the trace says it")
    if given.system and all(one.body is not None for one in trace):
        raise ConfigError(f"flag --system={given.system}: the trace has bodies only, which are sent as they are")
    return msgspec.structs.replace(PRESETS["customer-service"], system=given.system or 0), False


def _trace(given: Given) -> tuple[Recorded, ...]:
    if given.trace is None:
        return ()
    try:
        with given.trace.open("rb") as file:
            return read_trace(f"flag --trace={given.trace}", file, _endpoint(given.endpoint))
    except OSError as error:
        raise ConfigError(f"flag --trace={given.trace}: {error.strerror}") from error


Mode = tuple[tuple[int, ...], tuple[float, ...], tuple[float, float] | None, float | None]


def _mode(given: Given, trace: tuple[Recorded, ...]) -> Mode:
    asked = [name for name in ("concurrency", "rate", "ramp", "replay") if getattr(given, name) is not None]
    if len(asked) > 1:
        raise ConfigError(f"flags {', '.join(f'--{name}' for name in asked)}: only one of them")
    timed = bool(trace) and trace[0].at_s is not None
    if given.replay is not None and not 0 < given.replay <= MOST_SPEED:
        raise ConfigError(f"flag --replay={given.replay:g}: it must be above 0 and at most {MOST_SPEED:g}")
    if given.replay is not None and not timed:
        raise ConfigError("flag --replay: it needs --trace with at_s in every line")
    if given.replay is not None or (timed and not asked):
        return (), (), None, given.replay or 1.0
    if given.rate is not None:
        return (), _numbers("--rate", given.rate, MOST_RATE), None, None
    if given.ramp is not None:
        if given.requests is not None and given.duration is None:
            raise ConfigError("flag --requests: a ramp is bounded by --duration, which its stages lengthen")
        return (), (), _ramp(given.ramp), None
    if given.concurrency is None:
        return DEFAULT_CONCURRENCY, (), None, None
    levels = _numbers("--concurrency", given.concurrency, MOST_CONCURRENCY)
    if any(level != int(level) for level in levels):
        raise ConfigError(f"flag --concurrency={given.concurrency}: each must be a whole number")
    return tuple(int(level) for level in levels), (), None, None


def _check_end(given: Given, trace: tuple[Recorded, ...], rates: tuple[float, ...], speed: float | None) -> None:
    """What no duration bounds ends by its last request, which must not be due in a year."""
    if given.duration is not None:
        return
    if speed is not None:
        last = trace[: given.requests or len(trace)][-1].at_s or 0.0
        told, lasts = f"flag --replay={speed:g}: the trace", last / speed
    elif rates and given.requests:
        told, lasts = f"flag --rate={min(rates):g}: {given.requests} requests", given.requests / min(rates)
    else:
        return
    if lasts > MOST_SECONDS:
        raise ConfigError(f"{told} would take {lasts:.3g} s, at most {MOST_SECONDS}: bound it with --duration")


def _numbers(flag: str, text: str, most: float) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"flag {flag}={text}: it must be numbers with commas between") from None
    if len(numbers) > MOST_LEVELS:
        raise ConfigError(f"flag {flag}={text[:60]}: {len(numbers)} levels, at most {MOST_LEVELS}")
    if not all(0 < number <= most for number in numbers) or (flag == "--concurrency" and min(numbers) < 1):
        raise ConfigError(f"flag {flag}={text}: each must be above 0 and at most {most:g}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"flag {flag}={text}: each level once; --repeat measures all of them again")
    return numbers


def _ramp(text: str) -> tuple[float, float]:
    parts = text.split(":")
    if len(parts) != 2:
        raise ConfigError(f"flag --ramp={text}: it must be START:STOP in requests per second")
    start, stop = (_numbers("--ramp", part, MOST_RATE)[0] for part in parts)
    if start > stop:
        raise ConfigError(f"flag --ramp={text}: it starts above its stop")
    return start, stop


def _ms(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s)?", text.strip())
    value = float(found[1]) * (1000 if found[2] == "s" else 1) if found else 0.0
    if not 0 < value <= 86_400_000:
        raise ConfigError(f"flag {flag}={text}: it must be milliseconds above 0, such as 200, 200ms or 2s")
    return value
