"""What would happen to a request if it were sent now: the whole admission as a dry run.

Enters: a `Request`, the limits that its parsing tested, and what was measured of recent requests. Leaves: an
`Estimate`. Always true: nothing is reserved, queued, billed or recorded; token counts, memory, limits and the least and
most cost are exact, and come from the same code as the real thing; times and the expected cost are guesses from the
last requests to the same model, and None where there were none. Next: `pipeline.py`.
"""

from collections import deque
from statistics import fmean, median
from typing import Literal

import msgspec

from hitsend.core.errors import ContextLengthExceeded, LimitError, ModelNotFound, ServeError
from hitsend.core.events import Fitted, LimitCheck
from hitsend.core.limits import LevelCheck
from hitsend.core.request import Request, Usage
from hitsend.serve.access.quota import Ask
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.engine.protocol import Engine, EngineState, Job
from hitsend.serve.pipeline import constrain, count_handed_over, hand_over, longest_answer
from hitsend.serve.stages import Stages
from hitsend.serve.usage.figures import RequestFigures
from hitsend.serve.usage.pricing import cost_microusd, held_microusd

KEPT_REQUESTS = 64
"""Requests per model that "recent" means."""

WHY_THIS_ENGINE = "the only engine that serves this model"


class Measured(msgspec.Struct, frozen=True):
    """Medians (of the output: the mean) over recent requests that came to their end. None: nothing measured."""

    num_requests: int = 0
    prefill_tokens_per_s: float | None = None
    seconds_per_token: float | None = None
    run_s: float | None = None
    output_tokens: float | None = None


class Rates:
    """Remembers the last requests of every model."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[RequestFigures]] = {}

    def observe(self, figures: RequestFigures) -> None:
        """One request has ended."""
        if figures.completion_tokens and figures.error_code is None:
            self._kept.setdefault(figures.model, deque(maxlen=KEPT_REQUESTS)).append(figures)

    def of(self, model: str) -> Measured:
        """What is known about a model."""
        kept = self._kept.get(model, ())
        if not kept:
            return Measured()
        speeds = [one.prompt_tokens / one.prefill_s for one in kept if one.prefill_s]
        gaps = [one.tpot_s for one in kept if one.tpot_s is not None]
        return Measured(
            num_requests=len(kept),
            prefill_tokens_per_s=median(speeds) if speeds else None,
            seconds_per_token=median(gaps) if gaps else None,
            run_s=median(max(0.0, one.wall_s - (one.queue_s or 0.0)) for one in kept),
            output_tokens=fmean(one.completion_tokens for one in kept),
        )


class EngineChoice(msgspec.Struct, frozen=True):
    """Which engine would be asked, and why."""

    name: str
    why: str


class Memory(msgspec.Struct, frozen=True):
    """Cells (one token's attention) and state of all choices together at their longest."""

    cells_needed: int
    cells_free: int
    cells_total: int
    cells_bytes: int
    state_bytes: int


class Admission(msgspec.Struct, frozen=True):
    """`fits_ever`: it can be served at all. `fits_now`: it would start at once. `position`: choices that would be
    served before its first one, 0 where it fits now. `refusal` is what the request would be answered with.
    """

    fits_ever: bool
    fits_now: bool
    running: int
    waiting: int
    slots_free: int
    position: int
    refusal: dict[str, str] | None = None


class Times(msgspec.Struct, frozen=True):
    """Seconds, guessed."""

    wait_s: float | None
    ttft_s: float | None
    total_s: float | None


class Cost(msgspec.Struct, frozen=True):
    """Micro-USD. `least`: every choice ends with its first token; `most`: each goes to its limit, which is also what
    the hold would reserve. `expected` is guessed from the length of recent answers.
    """

    price_id: str
    least_microusd: int
    expected_microusd: int | None
    most_microusd: int


class Estimate(msgspec.Struct, frozen=True):
    """The answer of `/v1/estimate`. `max_output_tokens` is per choice, 0 where the prompt doesn't fit."""

    model: str
    engine: EngineChoice
    prompt_tokens: int
    max_output_tokens: int
    n: int
    memory: Memory
    admission: Admission
    cost: Cost
    times: Times
    measured: Measured
    limits: tuple[LimitCheck, ...]
    buckets: tuple[LevelCheck, ...] = ()
    warnings: tuple[str, ...] = ()
    object: Literal["hitsend.estimate"] = "hitsend.estimate"
    guessed: tuple[str, ...] = ("times", "cost.expected_microusd")


async def estimate(
    request: Request, limits: tuple[LimitCheck, ...], *, stages: Stages, rates: Rates, reserve_tokens: int
) -> Estimate:
    """Dry-run a chat request. Raises ModelNotFound, and what rendering and tokenising raise."""
    engine = stages.engines.get(request.model)
    if engine is None:
        raise ModelNotFound(f"model {request.model[:100]!r} is not served here", param="model")
    if engine.takes == "messages":
        return await _elsewhere(request, limits, engine, stages=stages, measured=rates.of(request.model))
    facts, now = engine.facts, engine.state()
    prompt = await stages.text.prepare(request, max_prompt_tokens=facts.cells_per_slot)
    num_tokens, refusal, output = prompt.num_tokens, None, 0
    buckets: tuple[LevelCheck, ...] = ()
    try:
        most = longest_answer(request, stages, len(prompt.prompt_token_ids))
        fitted = stages.budget.fit(request, prompt, facts, most)
        limits, output = (*limits, *fitted.limits), fitted.max_tokens
        engine.admit(await _job(request, prompt, fitted, stages))
        buckets = await after_the_hold(request, stages, num_tokens, output)
    except ServeError as error:
        refusal, buckets = error, _buckets_of(error)
        if isinstance(error, ContextLengthExceeded):
            asked = num_tokens + (request.max_tokens or 1)
            limits = (*limits, LimitCheck("prompt_and_max_tokens", asked, facts.cells_per_slot))
    measured = rates.of(request.model)
    admission = _admission(now, request.n, num_tokens + min(output, reserve_tokens), refusal)
    return Estimate(
        model=request.model,
        engine=EngineChoice(engine.name, WHY_THIS_ENGINE),
        prompt_tokens=num_tokens,
        max_output_tokens=output,
        n=request.n,
        memory=_memory(engine, now, request.n, num_tokens + output),
        admission=admission,
        cost=_cost(request, stages, num_tokens, output, measured),
        times=_times(admission, now, num_tokens, output, measured),
        measured=measured,
        limits=limits,
        buckets=buckets,
        warnings=request.warnings,
    )


async def _job(request: Request, prompt: Prompt, fitted: Fitted, stages: Stages) -> Job:
    """As the pipeline makes it."""
    return Job(
        request_id=request.request_id,
        prompt_token_ids=prompt.prompt_token_ids,
        sampling=fitted.sampling,
        n=request.n,
        max_tokens=fitted.max_tokens,
        deadline_s=stages.wait_timeout_s,
        constraint=await constrain(request, prompt.prompt_token_ids, stages),
        tier=request.served_tier,
        tenant=request.principal.tenant,
    )


async def _elsewhere(
    request: Request, limits: tuple[LimitCheck, ...], engine: Engine, *, stages: Stages, measured: Measured
) -> Estimate:
    """For an upstream: what would be held for the prompt is a bound, and memory is its own affair."""
    request, counted, _ = await count_handed_over(request, stages)
    now, refusal, output = engine.state(), None, 0
    buckets: tuple[LevelCheck, ...] = ()
    try:
        job, fitted = hand_over(request, stages, counted)
        limits, output = (*limits, *fitted.limits), fitted.max_tokens
        engine.admit(job)
        buckets = await after_the_hold(request, stages, counted.reserved, output)
    except ServeError as error:
        refusal, buckets = error, _buckets_of(error)
    admission = _admission(now, 1, 0, refusal)
    return Estimate(
        model=request.model,
        engine=EngineChoice(engine.name, WHY_THIS_ENGINE),
        prompt_tokens=counted.reserved,
        max_output_tokens=output,
        n=request.n,
        memory=Memory(0, 0, 0, 0, 0),
        admission=admission,
        cost=_cost(request, stages, counted.reserved, output, measured),
        times=_times(admission, now, counted.reserved, output, measured),
        measured=measured,
        limits=limits,
        buckets=buckets,
        warnings=request.warnings,
        guessed=("times", "cost.expected_microusd") if counted.is_exact else ("prompt_tokens", "times", "cost"),
    )


def _buckets_of(error: ServeError) -> tuple[LevelCheck, ...]:
    return error.windows.checks if isinstance(error, LimitError) and error.windows else ()


async def after_the_hold(request: Request, stages: Stages, prompt_tokens: int, output: int) -> tuple[LevelCheck, ...]:
    """Every limit of the caller's levels as it would stand with this request. Raises what reserving would."""
    levels, output_tokens = request.principal.levels, output * request.n
    if not levels:
        return ()
    price = stages.prices.find(request.model, is_local=stages.engines[request.model].is_local)
    held = held_microusd(price, prompt_tokens, output_tokens)
    return (await stages.quota.preview(Ask(request.request_id, levels, prompt_tokens, output_tokens, held))).checks


def _memory(engine: Engine, now: EngineState, n: int, tokens: int) -> Memory:
    facts = engine.facts
    return Memory(
        cells_needed=n * tokens,
        cells_free=now.cells_total - now.cells_used,
        cells_total=now.cells_total,
        cells_bytes=n * tokens * facts.kv_bytes_per_cell,
        state_bytes=n * facts.state_bytes_per_slot,
    )


def _admission(now: EngineState, n: int, cells_at_start: int, refusal: ServeError | None) -> Admission:
    slots_free = now.slots_total - now.slots_used
    has_room = slots_free >= n and now.cells_total - now.cells_used >= n * cells_at_start
    fits_now = refusal is None and has_room and now.waiting == 0
    return Admission(
        fits_ever=not isinstance(refusal, ContextLengthExceeded),
        fits_now=fits_now,
        running=now.running,
        waiting=now.waiting,
        slots_free=slots_free,
        position=0 if fits_now else now.waiting + 1,
        refusal=None if refusal is None else {"code": refusal.code, "message": refusal.message},
    )


def _times(admission: Admission, now: EngineState, prompt_tokens: int, output: int, measured: Measured) -> Times:
    speed, gap, run_s = measured.prefill_tokens_per_s, measured.seconds_per_token, measured.run_s
    wait_s = 0.0 if admission.fits_now else None
    if wait_s is None and run_s is not None and admission.fits_ever:
        wait_s = run_s * admission.position / max(1, now.slots_total)
    if wait_s is None or not speed:
        return Times(wait_s, None, None)
    ttft_s = wait_s + prompt_tokens / speed
    expected = min(output, measured.output_tokens or output)
    total_s = None if gap is None else ttft_s + max(0.0, expected - 1) * gap
    return Times(wait_s, ttft_s, total_s)


def _cost(request: Request, stages: Stages, prompt_tokens: int, output: int, measured: Measured) -> Cost:
    price = stages.prices.find(request.model, is_local=stages.engines[request.model].is_local)
    expected = None
    if measured.output_tokens is not None:
        tokens = min(output * request.n, round(measured.output_tokens))
        expected = cost_microusd(price, Usage(prompt_tokens, tokens))
    return Cost(
        price_id=price.id,
        least_microusd=cost_microusd(price, Usage(prompt_tokens, min(output, 1) * request.n)),
        expected_microusd=expected,
        most_microusd=held_microusd(price, prompt_tokens, output * request.n),
    )
