"""Many mixed requests over several engines that fail in every way; then the ledger is held against what each engine
really produced, to the token and the neuron. `make drill` asks 1,000, with the bundled model beside the upstreams.

Each emulated upstream does to a call what its seed says, and writes down what it produced for it: words that it sent,
and the bill that it gave. Where it gave one, the row must have exactly that; where none came, exactly the words.
"""

import asyncio
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from hitsend import settings
from hitsend.serve.app import running
from hitsend.settings_upstreams import UpstreamSettings, VllmSettings, WorkersAISettings
from tests.mock_upstream import Call, mock_upstream

WAYS = (
    *("whole", "whole", "whole", "whole", "no usage", "cut", "cut at once", "garbled", "error inside"),
    *("refused", "limited", "busy once", "away", "no capacity"),
)
STALL_SHARE = 0.02
LEAVE_SHARE = 0.15
STALL_S = 2.0
AT_ONCE = 12
PRICES = settings.UpstreamPrices(input=1.0, output=2.0)
MICRONEURONS = (40_909, 290_909)
"""Of qwen3.8-27b, per token of input and output."""
_NAME = re.compile(r"\bq\d+\b")
_WORD = re.compile(r"w\d+ ")


class Run(msgspec.Struct):
    """What one call to an upstream came to: `usage` is the bill that it gave."""

    engine: str
    way: str
    words: int = 0
    usage: tuple[int, int] | None = None
    is_judge: bool = False


class Emulator:
    """Three upstreams behind one socket, told apart by their paths and models."""

    def __init__(self, seed: int, *, stalls: bool) -> None:
        self.draw = random.Random(seed)
        self.stalls = stalls
        self.runs: defaultdict[str, list[Run]] = defaultdict(list)
        self.hangs: dict[str, int] = {}
        self.may_hang: set[str] = set()

    async def __call__(self, call: Call) -> None:
        said = call.body["messages"][-1]["content"]
        found = _NAME.search(said)
        assert found is not None
        name, engine = found[0], str(call.body["model"]).rpartition("/")[2]
        way = self._way(name, engine)
        run = Run(engine, way, is_judge=said.startswith("Question:"))
        self.runs[name].append(run)
        refusal = {"refused": "400 No", "limited": "429 No", "busy once": "503 No", "away": "500 No"}.get(way)
        if way == "no capacity":
            await call.answer("429 No", {"errors": [{"code": 3040, "message": "no capacity"}]})
        elif refusal is not None:
            await call.answer(refusal, {"error": {"code": "bad", "message": "no"}})
        else:
            await self._answer(call, name, run)

    def _way(self, name: str, engine: str) -> str:
        before = [run for run in self.runs[name] if run.engine == engine and not run.is_judge]
        if before and before[-1].way in ("busy once", "no capacity"):
            return "whole"
        if before and before[-1].way == "cut at once":
            return "no usage"
        if name in self.may_hang and self.draw.random() < LEAVE_SHARE * 2:
            return "left"
        if self.stalls and self.draw.random() < STALL_SHARE:
            return "stall"
        return self.draw.choice(WAYS)

    async def _answer(self, call: Call, name: str, run: Run) -> None:
        draw = self.draw
        run.words = 0 if run.way == "cut at once" else draw.randint(1, 9)
        if run.way == "whole":
            run.usage = (draw.randint(5, 50), run.words + draw.randint(0, 5))
        if run.way == "left":
            self.hangs[name] = run.words
        await call.start()
        await call.say(*(f"w{number} " for number in range(run.words)))
        if run.way in ("left", "stall"):
            await call.has_left.wait()
        elif run.way == "garbled":
            await call.event('{"choices": [')
        elif run.way == "error inside":
            await call.event({"error": {"message": "broke"}})
        elif not run.way.startswith("cut"):
            bill = (
                None if run.usage is None else dict(zip(("prompt_tokens", "completion_tokens"), run.usage, strict=True))
            )
            await call.finish(usage=bill)


class Report(msgspec.Struct):
    """Of one drill. `faults` is everything that isn't as it must be."""

    num_requests: int = 0
    num_rows: int = 0
    num_runs: int = 0
    tokens: Counter[str] = msgspec.field(default_factory=Counter)
    neurons_micro: int = 0
    faults: list[str] = msgspec.field(default_factory=list)


def tree(folder: Path, url: str, *, with_model: bool) -> settings.Settings:
    """The server: four names that are asked directly, and two routes."""
    root = url.removesuffix("/v1")
    patient: dict[str, Any] = {"breaker_failures": 10**6, "breaker_share": 1.0, "retry_share": 1.0}
    patient |= {"stall_timeout_s": STALL_S, "counts_prompts": "bytes", "connect_timeout_s": 60.0}
    engines = (
        UpstreamSettings(name="a", base_url=url, models={"a": "x/a"}, prices=PRICES, **patient),
        VllmSettings(name="b", base_url=root, models={"b": "x/b"}, prices=PRICES, metrics_poll_s=0.0, **patient),
        WorkersAISettings(
            name="c", base_url=f"{root}/ai", models={"c": "@cf/qwen/qwen3.8-27b"}, plan="paid", **patient
        ),
    )
    last = "local" if with_model else "b"
    cascade = settings.CascadeSettings(regex=r"(w\d+ ){4,}", judge="b")
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(folder)),
        engine=settings.EngineSettings(**({"alias": "local", "num_slots": 4} if with_model else {"model": "none"})),
        engines=engines,
        routes=(
            settings.RouteSettings(model="falls", engines=tuple(dict.fromkeys(("c", "a", last)))),
            settings.RouteSettings(model="drafts", engines=("a", "c", "b"), strategy="cascade", cascade=cascade),
        ),
    )


def fresh() -> aiohttp.TCPConnector:
    """A connection per request: none that is kept is closed just when it would be used again."""
    return aiohttp.TCPConnector(force_close=True)


async def account(folder: Path, num: int, *, seed: int = 7, with_model: bool = False, stalls: bool = False) -> Report:
    """Ask, then count."""
    async with mock_upstream() as mock:
        mock.script = emulator = Emulator(seed, stalls=stalls)
        async with (
            running(tree(folder, mock.url, with_model=with_model)) as server,
            aiohttp.ClientSession(connector=fresh()) as session,
        ):
            clients = _Clients(server.base_url, session, emulator, random.Random(seed + 1))
            names = [f"q{number}" for number in range(num)]
            models = ["a", "b", "c", "falls", "drafts", *(["local", "local"] if with_model else [])]
            plan = [(name, clients.draw.choice(models), clients.draw.random() < 0.6) for name in names]
            await asyncio.gather(*(clients.ask(*one) for one in plan))
            await clients.at_rest()
            rows = await clients.rows()
            report = Report(num, len(rows), sum(map(len, emulator.runs.values())))
            report.faults += await clients.drifted()
        judge(report, rows, emulator)
    return report


class _Clients:
    def __init__(self, url: str, session: aiohttp.ClientSession, emulator: Emulator, draw: random.Random) -> None:
        self._url, self._session, self._emulator, self.draw = url, session, emulator, draw
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def ask(self, name: str, model: str, is_streamed: bool) -> None:
        """To its end, or until it has what the upstream sent before it hung: then it leaves."""
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": name}], "max_tokens": 12}
        if is_streamed and model not in ("drafts", "local"):
            self._emulator.may_hang.add(name)
        async with self._turns:
            headers = {"x-request-id": name}
            url = f"{self._url}/v1/chat/completions"
            async with self._session.post(url, json=body | {"stream": is_streamed}, headers=headers) as answer:
                seen = b""
                leaves_after = (
                    self.draw.randint(1, 8) if model == "local" and self.draw.random() < LEAVE_SHARE else None
                )
                async for piece in answer.content:
                    seen += piece
                    num = len(_WORD.findall(seen.decode("utf-8", "replace")))
                    is_left = self._emulator.hangs.get(name) == num
                    if is_left or (leaves_after is not None and seen.count(b"data: ") >= leaves_after):
                        answer.close()
                        return

    async def _get(self, path: str) -> Any:
        async with self._session.get(self._url + path) as answer:
            return await answer.json()

    async def at_rest(self) -> None:
        """Nothing runs, nothing is held, nothing waits to be written."""
        async with asyncio.timeout(120):
            while True:
                state = await self._get("/inspect/state")
                if not any(state[name] for name in ("running", "waiting", "holds_open", "writes_waiting")):
                    return
                await asyncio.sleep(0.05)

    async def rows(self) -> list[dict[str, Any]]:
        """All of the ledger."""
        found: list[dict[str, Any]] = []
        after = 0
        while page := (await self._get(f"/admin/ledger?after={after}&limit=500"))["data"]:
            found += [one["row"] for one in page]
            after = page[-1]["seq"]
        return found

    async def drifted(self) -> list[str]:
        """What `/admin/reconcile` finds: of the bundled model too, every sampled token is in a row."""
        found = await self._get("/admin/reconcile")
        return [f"reconcile: {check}" for check in found["checks"] if check["name"] in found["drifted"]]


def judge(report: Report, rows: list[dict[str, Any]], emulator: Emulator) -> None:
    """Every run of every upstream against its request's rows at that engine."""
    by_run: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        name, engine = row["request_id"].partition("/")[0], row["engine"]
        report.tokens[engine] += row["prompt_tokens"] + row["completion_tokens"]
        if row["prompt_tokens"] or row["completion_tokens"] or row["cost_microusd"]:
            by_run[name, engine].append(row)
        report.faults += _priced(row)
        report.neurons_micro += row["neurons_micro"] or 0
    answered: set[tuple[str, str]] = set()
    for name, runs in emulator.runs.items():
        for engine in {run.engine for run in runs}:
            own = "c" if engine == "qwen3.8-27b" else engine
            worked = [run for run in runs if run.engine == engine and (run.words or run.usage)]
            answered.add((name, own))
            report.faults += _same(name, own, worked, by_run[name, own])
    report.faults += [
        f"{key}: rows of an engine that wasn't asked" for key in by_run if key not in answered and key[1] != "embedded"
    ]
    twice = [name for name, num in Counter(row["request_id"] for row in rows).items() if num > 1]
    report.faults += [f"{name}: two rows" for name in twice]


def _priced(row: dict[str, Any]) -> list[str]:
    """Cost and neurons, reckoned here from the tokens."""
    prompt, completion = row["prompt_tokens"], row["completion_tokens"]
    if row["engine"] == "c":
        neurons = prompt * MICRONEURONS[0] + completion * MICRONEURONS[1]
        wanted = (neurons, (neurons * 11 + 500_000) // 1_000_000)
    else:
        wanted = (None, 0 if row["engine"] == "embedded" else prompt + 2 * completion)
    got = (row["neurons_micro"], row["cost_microusd"])
    return [] if got == wanted else [f"{row['request_id']}: neurons and cost {got}, expected {wanted}"]


def _same(name: str, engine: str, runs: list[Run], rows: list[dict[str, Any]]) -> list[str]:
    """As many rows as runs that worked, and the same tokens in them, whatever the order."""
    wanted = sorted(run.usage[1] if run.usage is not None else run.words for run in runs)
    got = sorted(row["completion_tokens"] for row in rows)
    prompts = sorted(run.usage[0] for run in runs if run.usage is not None)
    billed = sorted(row["prompt_tokens"] for row in rows if not row["is_estimate"])
    where = f"{name} at {engine} ({', '.join(run.way for run in runs)})"
    faults = [] if got == wanted else [f"{where}: completion tokens {got}, produced {wanted}"]
    faults += [] if prompts == billed else [f"{where}: prompt tokens {billed}, told {prompts}"]
    return faults


async def shown(num: int, folder: Path) -> tuple[Report, str]:
    """The drill, and what it came to in words."""
    report = await account(folder, num, with_model=True, stalls=True)
    tokens = ", ".join(f"{engine} {count:,}" for engine, count in sorted(report.tokens.items()))
    neurons = report.neurons_micro / 1e6
    text = f"{report.num_requests} requests, {report.num_runs} calls to upstreams, {report.num_rows} rows"
    return report, f"{text}; tokens: {tokens}; {neurons:,.6f} neurons"
