"""The dry run: exact counts, exact bounds of the cost, honest guesses, and nothing where nothing is known."""

from types import SimpleNamespace

import msgspec
import pytest

from hitsend.core.errors import InvalidRequest, ModelNotFound, ServerOverloaded
from hitsend.core.limits import Level, Limits
from hitsend.core.request import Message, OutputFormat, Principal, Request
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.quota import Ask
from hitsend.serve.chat.budget import Budget
from hitsend.serve.chat.formats import Formats
from hitsend.serve.chat.presets import Defaults
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.engine.protocol import EngineState
from hitsend.serve.estimate import Rates, estimate
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.pricing import PriceBook
from hitsend.settings import PriceSettings
from hitsend.testing import FakeClock

FACTS = EngineFacts(
    model="m",
    architecture="a",
    library="l",
    vocab_size=100,
    context_train=100,
    num_slots=4,
    num_cells=400,
    cells_per_slot=100,
    kv_mode="per_stream",
    kv_bytes_per_cell=10,
    state_bytes_per_slot=7,
    weights_bytes=1,
    num_threads=1,
    is_hybrid=False,
)
IDLE = EngineState(
    is_ready=True,
    pid=1,
    restarts=0,
    running=0,
    waiting=0,
    cells_total=400,
    cells_used=0,
    slots_total=4,
    slots_used=0,
    preemptions_total=0,
    progress_age_s=0.0,
)
BUSY = msgspec.structs.replace(IDLE, running=4, waiting=3, slots_used=4, cells_used=400)
FIGURES = RequestFigures(
    model="m", wall_s=3.0, queue_s=1.0, prefill_s=0.5, tpot_s=0.1, prompt_tokens=100, completion_tokens=11
)


QUOTA = MemoryQuota(FakeClock(), None)  # without budgets, nothing asks the ledger


class Engine:
    name, facts = "embedded", FACTS
    takes = gives = "tokens"
    is_local = True

    def __init__(self, now: EngineState, refusal=None) -> None:
        self.now, self.refusal = now, refusal

    def state(self) -> EngineState:
        return self.now

    def shed(self, tenant, choices) -> None:
        return

    def admit(self, job) -> None:
        if self.refusal is not None:
            raise self.refusal


class Text:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    vocabulary = Vocabulary((b"a",) * 100)

    async def compile(self, source):
        raise InvalidRequest(f"{source.param}: can't be kept", param=source.param)

    async def prepare(self, request, *, max_prompt_tokens):
        ids = tuple(range(self.num_tokens)) if self.num_tokens <= max_prompt_tokens else ()
        return Prompt(ids, self.num_tokens, 0, (), 0, "", 0.0, 0.0, 0.0, 0.0)


async def ask(engine: Engine, num_tokens: int = 20, rates: Rates | None = None, **fields):
    stages = SimpleNamespace(
        engines={"m": engine},
        text=Text(num_tokens),
        budget=Budget(defaults=Defaults(), draw=lambda: 1),
        prices=PriceBook([PriceSettings(model="m", input=1.0, output=3.0, id="p")]),
        wait_timeout_s=1.0,
        formats=Formats(),
        quota=QUOTA,
    )
    request = Request("r", "m", (Message("user", "x"),), **fields)
    return await estimate(request, (), stages=stages, rates=rates or Rates(), reserve_tokens=5)


async def test_the_buckets_after_the_hold_are_shown_and_nothing_is_taken():
    limits = Limits(output_tokens_per_minute=61, tokens_per_request=70, requests_per_minute=2)
    caller = Principal(levels=(Level("org", ("acme",), limits),))
    for _ in range(3):
        found = await ask(Engine(IDLE), n=2, principal=caller)
        assert found.max_output_tokens == 25
        assert [(one.level, one.name, one.value, one.limit) for one in found.buckets] == [
            ("org acme", "requests_per_minute", 1, 2),
            ("org acme", "output_tokens_per_minute", 50, 61),
            ("org acme", "tokens_per_request", 70, 70),
        ]
        assert found.admission.refusal is None
    await QUOTA.reserve(Ask("other", caller.levels, 1, 20, 0))
    found = await ask(Engine(IDLE), n=2, principal=caller)
    assert found.admission.refusal["code"] == "rate_limit_exceeded"
    assert not found.admission.fits_now
    assert ("org acme", "output_tokens_per_minute", 70, 61) in {
        (one.level, one.name, one.value, one.limit) for one in found.buckets
    }


async def test_idle_and_nothing_measured():
    found = await ask(Engine(IDLE), max_tokens=30, n=2)
    assert (found.prompt_tokens, found.max_output_tokens, found.n) == (20, 30, 2)
    assert (found.memory.cells_needed, found.memory.cells_free) == (100, 400)
    assert (found.memory.cells_bytes, found.memory.state_bytes) == (1000, 14)
    assert found.admission.fits_ever
    assert found.admission.fits_now
    assert found.admission.position == 0
    assert (found.times.wait_s, found.times.ttft_s, found.times.total_s) == (0.0, None, None)
    assert found.cost.price_id == "p"
    assert (found.cost.least_microusd, found.cost.expected_microusd, found.cost.most_microusd) == (26, None, 200)
    assert {(one.name, one.value, one.limit) for one in found.limits} >= {("prompt_and_max_tokens", 50, 100)}


async def test_times_and_expected_cost_come_from_recent_requests():
    rates = Rates()
    for _ in range(100):
        rates.observe(FIGURES)
    rates.observe(RequestFigures(model="m", wall_s=99.0, error_code="engine_failed", completion_tokens=5))
    found = await ask(Engine(IDLE), rates=rates, max_tokens=30)
    assert found.measured.num_requests == 64
    assert found.times.ttft_s == pytest.approx(20 / 200)
    assert found.times.total_s == pytest.approx(20 / 200 + 10 * 0.1)
    assert found.cost.expected_microusd == 20 + 33
    assert found.cost.least_microusd <= found.cost.expected_microusd <= found.cost.most_microusd
    busy = await ask(Engine(BUSY), rates=rates, max_tokens=30)
    assert not busy.admission.fits_now
    assert busy.admission.position == 4
    assert busy.times.wait_s == pytest.approx(2.0)
    assert (await ask(Engine(BUSY), max_tokens=30)).times.wait_s is None


async def test_an_answer_is_never_expected_to_be_longer_than_it_may():
    rates = Rates()
    rates.observe(FIGURES)
    found = await ask(Engine(IDLE), rates=rates, max_tokens=4)
    assert found.cost.expected_microusd == found.cost.most_microusd == 32


@pytest.mark.parametrize(("num_tokens", "max_tokens", "asked"), [(100, None, 101), (300, None, 301), (60, 41, 101)])
async def test_what_never_fits_is_said_with_its_numbers(num_tokens, max_tokens, asked):
    found = await ask(Engine(IDLE), num_tokens, max_tokens=max_tokens)
    assert not found.admission.fits_ever
    assert not found.admission.fits_now
    assert found.admission.refusal["code"] == "context_length_exceeded"
    assert found.prompt_tokens == num_tokens
    assert ("prompt_and_max_tokens", asked, 100) in {(one.name, one.value, one.limit) for one in found.limits}


async def test_a_full_queue_is_a_refusal_now_and_not_for_ever():
    found = await ask(Engine(BUSY, ServerOverloaded("full")), max_tokens=5)
    assert found.admission.fits_ever
    assert found.admission.refusal == {"code": "server_overloaded", "message": "full"}


async def test_a_format_that_cannot_be_kept_is_refused_as_the_real_request_would_be():
    found = await ask(Engine(IDLE), max_tokens=5, output_format=OutputFormat("json_schema", {}))
    assert found.admission.refusal == {"code": "invalid_request", "message": "response_format: can't be kept"}
    assert not found.admission.fits_now


async def test_an_unknown_model_is_not_estimated():
    stages = SimpleNamespace(engines={})
    with pytest.raises(ModelNotFound):
        await estimate(Request("r", "x", ()), (), stages=stages, rates=Rates(), reserve_tokens=1)
