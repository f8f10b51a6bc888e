"""The planner's simulator beside the engine that it simulates: the same traces, measured and simulated.

Usage: python -m bench.simulator [--rounds 1] [--requests 60] [--threads N] [--only chats] [--sleep]
       [--json FILE]
A real server with the bundled model. By turns: a calibration (`hitsend load` at several concurrencies, step times from
the flight records), then a workload by `hitsend load`, whose trace (arrivals, lengths, what prompts share, the tokens
that were asked and answered) goes into `hitsend plan simulate` with the calibrations before and after it. Three
workloads: a closed loop of 8 with fixed lengths, an open loop at 70 % of what the simulator says that the server can
do, and chats that share a system prompt.

Two columns are simulated. "alone": step times from the calibrations only; on a machine that others use they are of
another moment than the workload. "at its speed": the same constants, each step as much slower or faster than they say
as the steps of the workload's own records were at that point of its work; that leaves what the simulator is for,
the scheduler, and takes out how busy the machine was.

`--sleep`: the engine waits for as long as a formula says where it would compute (`bench/sleeper/`); everything else is
real. `--threads 1`: on a machine that others use, two threads that wait for each other lose more than they share.
"""

import argparse
import csv
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bench.serving import machine
from hitsend.cli.plan_simulate import trace_document
from hitsend.cli.plan_steps import room_of
from hitsend.plan.fleet import Place
from hitsend.plan.simulate import simulate
from hitsend.plan.steps import Calibration, Observed, answers_of, calibrated, seconds_of, steps_of
from hitsend.plan.timing import MeasuredTiming, Work
from hitsend.plan.traffic import Arrival, read_trace
from tests.served import Served, serving

SATURATED = 0.7
WINDOW_S = 1.0
"""The machine's speed is a mean over so much work."""
METRICS = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms")
CACHE_BYTES = 512 << 20
TIMEOUT_S = 1500
CALIBRATION = ("--concurrency", "1,4,12", "--input", "uniform:32,400", "--output", "uniform:16,64")
KINDS = ("closed", "open", "chats")
FEWEST = 8
"""Requests of each of a calibration's levels: a quarter of a workload's, but not below this."""


class Ran(NamedTuple):
    """One `hitsend load`: its levels, its rows, and its requests' flight records."""

    levels: list[dict[str, Any]]
    rows: list[dict[str, str]]
    records: list[dict[str, Any]]


class Workload(NamedTuple):
    """`words` for `hitsend load`; `concurrency` for the simulator (None: an open loop)."""

    name: str
    words: tuple[str, ...]
    concurrency: int | None


def load(served: Served, words: Sequence[str], folder: pathlib.Path, seed: int) -> Ran:
    """Run it, and fetch what the server recorded."""
    rows_file = folder / "rows.csv"
    command = [sys.executable, "-m", "hitsend", "load", "--url", served.url, "--warmup", "0", "--timeout", "900"]
    command += ["--seed", str(seed), "--json", "--csv", str(rows_file), *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if ran.returncode:
        raise SystemExit(f"hitsend load failed:\n{ran.stderr[-2000:]}")
    served.wait_idle(60)
    with rows_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    failed = [row["error"] for row in rows if row["outcome"] != "ok"]
    if failed:
        raise SystemExit(f"requests failed: {failed[:5]}")
    levels = json.loads(ran.stdout)["targets"][0]["levels"]
    return Ran(levels, rows, [served.record(row["request_id"]) for row in rows])


def calibrate(served: Served, requests: int, folder: pathlib.Path, seed: int) -> Ran:
    """Mixed lengths at several concurrencies."""
    return load(served, (*CALIBRATION, "--requests", str(max(FEWEST, requests // 4))), folder, seed)


def calibration_of(runs: Sequence[Ran], served: Served) -> Calibration:
    """From several runs; the way back to the client is what the client saw beyond the record."""
    records = [record for ran in runs for record in ran.records]
    back = []
    for ran in runs:
        for row, record in zip(ran.rows, ran.records, strict=True):
            first = next(event["at_ms"] for event in record["events"] if event["type"] == "first_token")
            back.append(float(row["ttft_sent_ms"]) - first)
    found = calibrated(records, after_ms=max(0.0, statistics.median(back)))
    return msgspec.structs.replace(found, room=room_of(served.state()))


def trace_of(ran: Ran) -> list[dict[str, Any]]:
    """What was asked: arrivals, lengths, and which beginnings of prompts repeat what, by the texts themselves."""
    pairs = sorted(zip(ran.rows, ran.records, strict=True), key=lambda pair: int(pair[0]["number"]))
    matched = [_matched(record) for _, record in pairs]
    firsts = [known for (row, _), known in zip(pairs, matched, strict=True) if row["turn"] == "1"]
    shared = int(statistics.median(firsts))
    has_turns = any(row["turn"] != "1" for row, _ in pairs)
    begin_s = min(float(row["intended_s"]) for row, _ in pairs)
    lines = []
    for (row, record), known in zip(pairs, matched, strict=True):
        line: dict[str, Any] = {"at_s": float(row["intended_s"]) - begin_s}
        line |= {"input_tokens": int(row["input_tokens"]), "output_tokens": int(row["output_tokens"])}
        line |= {"cached_tokens": shared} | _said(record)
        if has_turns:
            line |= {"conversation": row["conversation"], "repeated_tokens": known}
        lines.append(line)
    return lines


def _said(record: dict[str, Any]) -> dict[str, Any]:
    """The tokens themselves: which of an answer's could be guessed ahead is the traffic's, as lengths are."""
    asked = next(event["prompt_token_ids"] for event in record["events"] if event["type"] == "tokenized")
    return {"prompt_token_ids": asked, "output_token_ids": record["output_token_ids"]["0"]}


def _matched(record: dict[str, Any]) -> int:
    found = [event["matched_tokens"] for event in record["events"] if event["type"] == "prefix_matched"]
    return int(found[0]) if found else 0


class AtSpeed:
    """Step times on a machine that was slower or faster from one second of work to the next."""

    def __init__(self, timing: MeasuredTiming, steps: Sequence[Observed]) -> None:
        self._timing, self.between_ms = timing, timing.between_ms
        self._factors: list[float] = []
        nominal_s = actual_s = 0.0
        for step in steps:
            nominal_s += seconds_of(timing, step.work)
            actual_s += step.seconds
            if nominal_s >= WINDOW_S:
                self._factors.append(actual_s / nominal_s)
                nominal_s = actual_s = 0.0
        self._factors.append(actual_s / nominal_s if nominal_s else 1.0)
        self._done_s = 0.0

    @property
    def slowest(self) -> float:
        """The machine's slowest second beside its calibration."""
        return max(self._factors)

    def step_s(self, work: Work) -> float:
        """At the speed of now."""
        return self._stretched(self._timing.step_s(work))

    def copy_s(self, tokens: int) -> float:
        """At the speed of now."""
        return self._stretched(self._timing.copy_s(tokens))

    def _stretched(self, seconds: float) -> float:
        factor = self._factors[min(int(self._done_s / WINDOW_S), len(self._factors) - 1)]
        self._done_s += seconds
        return seconds * factor


def simulated_at_its_speed(
    calibration: Calibration, ran: Ran, trace: pathlib.Path, concurrency: int | None
) -> tuple[dict[str, float], AtSpeed]:
    """As `plan simulate`, with the workload's own speed."""
    room = calibration.room
    assert room is not None
    timing = AtSpeed(calibration.timing, steps_of(ran.records))
    place = Place(
        slots=room.slots,
        cells_per_slot=room.cells_per_slot,
        cells=room.cells,
        step_tokens=512,
        prefix_cache_bytes=CACHE_BYTES,
        drafts=room.drafts,
    )
    arrivals = read_trace(trace, is_timed=concurrency is None)
    served = simulate(
        arrivals,
        timing,
        place,
        concurrency=concurrency,
        answers=calibration.answers,
        edge=calibration.edge,
        usual=calibration.timing,
    )
    return _metrics(trace_document([served])), timing


def simulated(calibration: Calibration, trace: pathlib.Path, concurrency: int | None) -> dict[str, float]:
    """By the command."""
    timing = trace.with_name("timing.json")
    timing.write_bytes(msgspec.json.encode(calibration))
    words = [sys.executable, "-m", "hitsend", "plan", "simulate", "--trace", str(trace), "--timing", str(timing)]
    words += ["--json", *(["--concurrency", str(concurrency)] if concurrency else [])]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    if ran.returncode:
        raise SystemExit(f"plan simulate failed:\n{ran.stderr[-2000:]}")
    return _metrics(json.loads(ran.stdout))


def _metrics(level: dict[str, Any]) -> dict[str, float]:
    ttft, tpot = level["ttft_ms"], level["tpot_ms"]
    return {
        "output_tokens_per_s": level["output_tokens_per_s"],
        "ttft_p50_ms": ttft["p50"],
        "ttft_p99_ms": ttft["p99"],
        "tpot_p50_ms": tpot["p50"],
        "cached_tokens_mean": level["cached_tokens_mean"] or 0.0,
    }


def open_loop(calibration: Calibration, folder: pathlib.Path, requests: int, seed: int) -> Workload:
    """Mixed lengths, independent arrivals, at a share of the rate at which the simulator serves them when all wait."""
    rng = random.Random(seed)

    def length(median: int, least: int, most: int) -> int:
        return min(most, max(least, round(rng.lognormvariate(0.0, 0.6) * median)))

    sizes = [(length(130, 24, 800), length(36, 4, 128)) for _ in range(requests)]
    asked = [Arrival(0.0, entry, leave) for entry, leave in sizes]
    room = calibration.room
    assert room is not None
    place = Place(slots=room.slots, cells_per_slot=room.cells_per_slot, cells=room.cells, step_tokens=512)
    served = simulate(asked, calibration.timing, place, answers=calibration.answers)
    rate = SATURATED * requests / max(one.ended_s for one in served)
    at_s, lines = 0.0, []
    for entry, leave in sizes:
        lines.append({"at_s": at_s, "input_tokens": entry, "output_tokens": leave})
        at_s += rng.expovariate(rate)
    trace = folder / "open.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Workload(f"open loop, {rate:.2f}/s", ("--trace", str(trace), "--replay", "1", "--system", "0"), None)


def closed_loop(requests: int) -> Workload:
    """Eight at once, all alike."""
    words = ("--concurrency", "8", "--input", "128", "--output", "64", "--requests", str(requests))
    return Workload("closed loop of 8", words, 8)


def chats(requests: int) -> Workload:
    """Six at once, five turns, a system prompt that all share."""
    words = ("--concurrency", "6", "--system", "200", "--turns", "5", "--input", "uniform:16,64")
    return Workload("chats, 6 at once", (*words, "--output", "uniform:16,48", "--requests", str(requests)), 6)


def run_one(
    served: Served, workload: Workload, calibrations: list[Ran], folder: pathlib.Path, seed: int
) -> dict[str, Any]:
    """The workload, the calibration after it, and both simulations."""
    ran = load(served, workload.words, folder, seed)
    calibrations.append(calibrate(served, len(ran.rows), folder, seed + 1))
    # How answers repeat themselves, and so what drafts gain, is the traffic's, as its lengths are: not the machine's.
    calibration = msgspec.structs.replace(calibration_of(calibrations[-2:], served), answers=answers_of(ran.records))
    trace = folder / "asked.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in trace_of(ran)))
    alone = simulated(calibration, trace, workload.concurrency)
    paced, timing = simulated_at_its_speed(calibration, ran, trace, workload.concurrency)
    return {
        "workload": workload.name,
        "requests": len(ran.rows),
        "measured": _metrics(ran.levels[0]),
        "alone": alone,
        "at_its_speed": paced,
        "slowest_second": timing.slowest,
        "step_error": calibration.error,
        "calibration": msgspec.to_builtins(calibration),
    }


def run(rounds: int, requests: int, seed: int, threads: int, kinds: Sequence[int]) -> list[dict[str, Any]]:
    """Everything, calibrations and workloads by turns."""
    results = []
    words = ("--set", f"engine.num_threads={threads}", "--set", "record.text=true")
    with serving(*words) as served, tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        load(served, ("--concurrency", "2", "--input", "64", "--output", "16", "--requests", "4"), folder, seed)
        calibrations = [calibrate(served, requests, folder, seed + 1)]
        for number in range(rounds):
            for kind in kinds:
                at = seed + 100 * number + 10 * (kind + 1)
                if kind == 1:
                    workload = open_loop(calibration_of(calibrations[-1:], served), folder, requests, at)
                else:
                    workload = closed_loop(requests) if kind == 0 else chats(requests)
                results.append(run_one(served, workload, calibrations, folder, at) | {"kind": kind})
                show(results[-1:])
    return results


def show(results: Sequence[dict[str, Any]]) -> None:
    """Markdown rows."""
    for one in results:
        head = f"{one['workload']}, {one['requests']} requests, slowest second {one['slowest_second']:.1f} x"
        print(f"{head}, steps {one['step_error']:.0%} off", flush=True)
        for name, measured in one["measured"].items():
            alone, paced = one["alone"][name], one["at_its_speed"][name]
            print(
                f"| {name} | {measured:.1f} | {alone:.1f} {off(alone, measured)} | {paced:.1f} {off(paced, measured)} |"
            )


def off(value: float, measured: float) -> str:
    """The difference in percent."""
    return f"{value / measured - 1:+.1%}" if measured else ""


def show_medians(results: Sequence[dict[str, Any]]) -> None:
    """Of each workload's rounds: the median difference of each figure."""
    print("\n| workload | figure | measured | simulated alone | at its speed |\n|---|---|---|---|---|")
    for kind in range(3):
        rounds = [one for one in results if one["kind"] == kind]
        for name in METRICS if rounds else ():
            cells = [statistics.median(one["measured"][name] for one in rounds)]
            shares = [
                statistics.median(one[column][name] / one["measured"][name] - 1 for one in rounds)
                for column in ("alone", "at_its_speed")
            ]
            told = " | ".join(f"{share:+.1%}" for share in shares)
            print(f"| {rounds[0]['workload'].split(',')[0]} | {name} | {cells[0]:.1f} | {told} |")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    if asked.sleep:
        folder = str(pathlib.Path(__file__).with_name("sleeper"))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    print(machine(asked.threads), file=sys.stderr)
    results = run(asked.rounds, asked.requests, asked.seed, asked.threads, [KINDS.index(one) for one in asked.only])
    show_medians(results)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
