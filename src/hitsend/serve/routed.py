"""One request whose model's name is a route's: an engine is chosen, asked, and given up for the next one.

Enters: a `Request` and the `Flight` that records it, as for `pipeline.py`. Leaves: the same items. Always true: there
is one hold and one row, which is that of the engine that answered; another engine is asked only while the client has
got nothing; what an engine that was given up had computed gets a row of its own under nobody's key, but for rejected
drafts where the settings say that the caller pays; the route's name must be among the caller's models, its engines
needn't; the answer names the route. Next: `pipeline.py`.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import msgspec

from hitsend.core.errors import (
    ContextLengthExceeded,
    EngineError,
    InsufficientQuota,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    RateLimitExceeded,
    RequestTooLarge,
    ServeError,
    ServerOverloaded,
)
from hitsend.core.events import Routed
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Delta, Principal, Request, Started, Usage
from hitsend.core.route_events import Abandoned, Judged, Shadowed
from hitsend.serve.access.rights import check_model
from hitsend.serve.account import Account, to_its_end
from hitsend.serve.aside import Asides, Tried, payer_of
from hitsend.serve.candidates import able_request, facts_of, targets_of
from hitsend.serve.cascade import Draft, Scorers, Verdict
from hitsend.serve.engine.refusals import LacksModel
from hitsend.serve.engine.router import Decision, Moment, Observed, decide, share_of
from hitsend.serve.engine.targets import Comparison, Targets
from hitsend.serve.pipeline import Attempt, account_of, begin, note_engine, prepare, run, started, warnings_of
from hitsend.serve.stages import Stages
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.rows import HoldRequest
from hitsend.settings import RouteSettings

ENGINES_FAULT = (EngineError, ServerOverloaded, RateLimitExceeded, InsufficientQuota)
LACKING = (LacksModel, ModelNotFound, PermissionDenied)
"""An engine that hasn't the model that the settings say it has, or doesn't let this account use it."""
FALLS_THROUGH = (*ENGINES_FAULT, *LACKING, ContextLengthExceeded, RequestTooLarge)
"""What another engine may do better; an engine's own 400 it may not."""
DAY_S = 86_400
REJECTED = "rejected"


@dataclass(frozen=True)
class Routing:
    """All that routes need; built once by `app.py`. `stages` are every model's, `scorers` go by route.

    `paid_drafts`: engines of a cascade whose drafts the caller has paid for before, in a run that a crash cut off.
    """

    stages: Stages
    targets: Targets
    asides: Asides
    scorers: dict[str, Scorers] = field(default_factory=dict)
    paid_drafts: frozenset[str] = frozenset()

    async def decide(self, request: Request) -> Decision:
        """Which engines are asked, in order, and why. Raises InvalidRequest where none can serve it."""
        route = self.targets.routes[request.model]
        facts = await facts_of(request, route, self.stages)
        found, errors = targets_of(request, route, self.stages, self.targets)
        clock = self.stages.clock
        minute = int(clock.wall() % DAY_S) // 60
        decision = decide(facts, route, found, Moment(clock.now(), minute, self.targets.rolled_back.get(route.model)))
        if not decision.order:
            raise errors[route.engines[0]]
        is_drafting = route.strategy == "cascade" and not route.cascade.bills_drafts and len(decision.order) > 1
        if is_drafting and not await self.asides.may_spend(request, route):
            reason = "what the operator pays of this route is used up for today: no drafts"
            return msgspec.structs.replace(decision, order=decision.order[-1:], reason=reason)
        return decision

    def model_of(self, route: str, name: str) -> str:
        """The served model that a name in a route stands for."""
        return self.targets.models[route][name]


@dataclass(frozen=True)
class _Answer:
    """What an engine has begun to say."""

    attempt: Attempt
    started: Started
    deltas: AsyncGenerator[Delta]
    warnings: tuple[str, ...]


def run_named(routing: Routing, request: Request, flight: Flight) -> AsyncGenerator[Started | Delta | Completed]:
    """Live through one request, whether its model's name is a route's or an engine's. Raises as `run` does."""
    if request.model in routing.targets.routes:
        return run_routed(request, flight, routing)
    return run(request, flight, routing.stages.of(request.model))


async def run_routed(request: Request, flight: Flight, routing: Routing) -> AsyncGenerator[Started | Delta | Completed]:
    """Live through one request to a route. Raises ServeErrors, like `pipeline.run`."""
    check_model(request.principal, request.model, (*routing.stages.engines, *routing.targets.routes))
    course = _Course(request, flight, routing, await routing.decide(request))
    async with AsyncExitStack() as stack:
        answer = await course.answer(stack)
        texts, is_ok = course.copy(), True
        try:
            yield msgspec.structs.replace(answer.started, model=request.model)
            async for delta in answer.deltas:
                if texts is not None and delta.index == 0:
                    texts.append(delta.text)
                yield delta
        except EngineError:
            is_ok = False
            raise
        finally:
            course.observe(is_ok=is_ok)
    flight.enter(State.FINISHED)
    course.end(texts)
    yield Completed(flight.usage, flight.cost_microusd + course.billed_microusd, flight.timings(), answer.warnings)


class _Course:
    """One request's way through the engines of its route."""

    def __init__(self, request: Request, flight: Flight, routing: Routing, decision: Decision) -> None:
        self.billed_microusd = 0
        self._num_judged = 0
        self._request = request
        self._flight = flight
        self._routing = routing
        self._route: RouteSettings = routing.targets.routes[request.model]
        self._decision = decision
        self._name = decision.order[0]
        self._account: Account | None = None
        self._attempt: Attempt | None = None
        self._is_own = False
        self._began_at = 0.0
        self._comparison: Comparison | None = None

    async def answer(self, stack: AsyncExitStack) -> _Answer:
        """Of the first engine that gives one. `stack` ends the hold. Raises the last one's error."""
        for number, name in enumerate(self._decision.order, 1):
            self._name, self._began_at = name, self._routing.stages.clock.now()
            is_last = number == len(self._decision.order)
            try:
                answer = await self._ask(stack, number, is_last=is_last)
            except ServeError as error:
                if isinstance(error, (*ENGINES_FAULT, *LACKING)) and not self._is_own:
                    self.observe(is_ok=False)
                if is_last or self._is_own or not self._falls_through(error):
                    raise
                await self._give_up(error)
                continue
            if answer is not None:
                return answer
        raise AssertionError("the last engine answers or raises")

    def _falls_through(self, error: ServeError) -> bool:
        """A field that an engine doesn't take is refused before anything is sent; what it refuses itself is final."""
        has_begun = self._account is not None and self._account.is_watching
        is_field = isinstance(error, InvalidRequest) and not has_begun and self._route.unsupported == "next"
        return is_field or isinstance(error, FALLS_THROUGH)

    async def _ask(self, stack: AsyncExitStack, number: int, *, is_last: bool) -> _Answer | None:
        flight, route = self._flight, self._route
        stages = self._routing.stages.of(self._model)
        asked = able_request(self._request, route, self._model, stages)
        is_draft = route.strategy == "cascade" and not is_last
        scorers = self._routing.scorers.get(route.model)
        if is_draft and scorers is not None and scorers.wants_logprobs:
            asked = msgspec.structs.replace(asked, logprobs=True)
        reason = self._decision.reason if number == 1 else f"number {number} in order: the one before was given up"
        why = Routed("", "", reason, route=route.model, attempt=number)
        if number == 1:
            shown = tuple(map(msgspec.to_builtins, self._decision.candidates))
            why = msgspec.structs.replace(why, candidates=shown, facts=msgspec.to_builtins(self._decision.facts))
        note_engine(asked, flight, stages, why)
        attempt = await prepare(asked, flight, stages, stages.engines[self._model])
        account = await self._hold(stack, attempt)
        deltas, choices = begin(attempt, flight, account)
        word = await started(attempt, flight, account)
        if is_draft:
            assert scorers is not None
            drafted = [delta async for delta in deltas]
            if not await self._accepts(attempt, drafted, scorers):
                return None
            deltas = _again(drafted, wants_logprobs=self._request.logprobs)
        elif not is_last:
            deltas = _after(await anext(deltas, None), deltas)
        return _Answer(attempt, word, deltas, warnings_of(attempt, choices))

    @property
    def _model(self) -> str:
        return self._routing.model_of(self._route.model, self._name)

    async def _hold(self, stack: AsyncExitStack, attempt: Attempt) -> Account:
        """The first engine's hold is taken, and moved to the next ones. Its refusals are the caller's own limits, but
        for one that no level of the caller's gave: the engine's own allowance for the day."""
        self._is_own = True
        try:
            if self._account is None:
                self._account = await stack.enter_async_context(account_of(attempt, self._flight))
            else:
                await self._account.move(attempt.hold())
        except InsufficientQuota as error:
            self._is_own = error.refused_by is not None
            raise
        self._is_own, self._attempt = False, attempt
        return self._account

    async def _give_up(self, error: ServeError) -> None:
        await self._leave(error.code, error.message, payer=None)

    async def _leave(self, code: str, message: str, *, payer: Principal | None) -> None:
        """What it had computed gets a row of its own, `payer`'s or nobody's, so that every cost is in the ledger.

        Once begun it comes to its end: a client that leaves meanwhile makes nothing of that undone."""
        await to_its_end(self._left(code, message, payer=payer))

    async def _left(self, code: str, message: str, *, payer: Principal | None) -> None:
        attempt, self._attempt = self._attempt, None
        model = self._model
        gone = Abandoned(0.0, self._routing.stages.engines[model].name, model, code, message)
        if self._account is not None and attempt is not None:
            found = await self._account.abandon(code, bills=payer is not None)
            if found.usage != Usage() or found.discarded_tokens:
                gone = await self._written(gone, attempt.hold(), found, payer)
        now = self._routing.stages.clock.now()
        self._flight.record(msgspec.structs.replace(gone, at=now))

    async def _written(
        self, gone: Abandoned, hold: HoldRequest, found: Settlement, payer: Principal | None
    ) -> Abandoned:
        suffix = f"{'draft' if found.reason == REJECTED else 'tried'}/{self._name}"
        principal = payer or payer_of(self._route, hold.principal)
        hold = msgspec.structs.replace(
            hold,
            request_id=f"{hold.request_id}/{suffix}",
            principal=principal,
            neurons_limit_micro=None,  # what was computed was computed, whether the day had room for it or not
        )
        row = await self._routing.asides.keep(
            Tried(hold, found, self._route.model, self._began_at, is_counted=payer is not None)
        )
        billed = row.cost_microusd if payer is not None else 0
        self.billed_microusd += billed
        return msgspec.structs.replace(
            gone,
            prompt_tokens=row.prompt_tokens,
            completion_tokens=row.completion_tokens,
            cost_microusd=row.cost_microusd,
            billed_microusd=billed,
        )

    async def _accepts(self, attempt: Attempt, drafted: Sequence[Delta], scorers: Scorers) -> bool:
        """Judge it. A rejected draft gets a row of its own, so that its cost is in the ledger once."""
        clock, engine, model = self._routing.stages.clock, attempt.engine.name, self._model
        began_at, cost = clock.now(), 0
        drafts = drafts_of(drafted, attempt.job.num_choices)
        verdict = Verdict(accepted=False, verdicts={"answer": "rejected: empty"})
        for draft in drafts:
            self._num_judged += 1  # of all engines and choices: each judge has a row of its own
            verdict = await scorers.judge(self._request, draft, self._routing.asides, self._num_judged)
            cost += verdict.judge_microusd
            if not verdict.accepted:
                break
        mean = drafts[0].mean_logprob if drafts else None
        now = clock.now()
        self._flight.record(Judged(began_at, now, engine, model, verdict.accepted, verdict.verdicts, mean, cost))
        self._routing.targets.judged(self._route.model, self._name, is_accepted=verdict.accepted)
        if verdict.accepted:
            return True
        self.observe(is_ok=True)
        is_billed = self._route.cascade.bills_drafts and self._name not in self._routing.paid_drafts
        payer = attempt.request.principal if is_billed else None
        await self._leave(REJECTED, "the draft was rejected", payer=payer)
        return False

    def observe(self, *, is_ok: bool) -> None:
        """What became of the engine that was asked last."""
        first, now = self._flight.first_token_at, self._routing.stages.clock.now()
        seen = Observed(now, is_ok, None if first is None or not is_ok else max(0.0, first - self._began_at))
        self._routing.targets.observe(self._route.model, self._name, seen)

    def copy(self) -> list[str] | None:
        """Send a copy to the shadow, if there is one; then the answer's text is wanted for comparing."""
        route, request, routing = self._route, self._request, self._routing
        if route.shadow is None or share_of(request.request_id, f"{route.model}/shadow") >= route.shadow_share:
            return None
        model = routing.model_of(route.model, route.shadow)
        copied = able_request(request, route, model, routing.stages)
        comparison = Comparison(routing.targets.shadows[route.model])
        sent = routing.asides.copy(copied, route.model, route.shadow_concurrent, comparison.copied)
        comparison.figures.num_skipped += sent is None
        self._flight.record(Shadowed(model, sent))
        self._comparison = None if sent is None else comparison
        return None if sent is None else []

    def end(self, texts: list[str] | None) -> None:
        """The answer is whole."""
        if self._comparison is not None and texts is not None:
            self._comparison.answered("".join(texts), self._flight.cost_microusd, self._flight.wall_ms / 1000.0)


def drafts_of(deltas: Sequence[Delta], num_choices: int) -> list[Draft]:
    """What each choice came to."""
    drafts = []
    for index in range(num_choices):
        mine = [delta for delta in deltas if delta.index == index]
        logprobs = tuple(one.logprob for delta in mine for one in delta.logprobs)
        is_whole = bool(mine) and mine[-1].finish_reason not in (None, FinishReason.LENGTH)
        drafts.append(Draft("".join(delta.text for delta in mine), logprobs, is_whole, _calls_of(mine)))
    return drafts


def _calls_of(deltas: Sequence[Delta]) -> tuple[tuple[str, str], ...]:
    names: dict[int, str] = {}
    pieces: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        names.setdefault(call.index, call.name or "")
        pieces.setdefault(call.index, []).append(call.arguments)
    return tuple((name, "".join(pieces[index])) for index, name in names.items())


async def _again(drafted: Sequence[Delta], *, wants_logprobs: bool) -> AsyncGenerator[Delta]:
    """A draft that was accepted, without what only the judge asked for."""
    for delta in drafted:
        yield delta if wants_logprobs else msgspec.structs.replace(delta, logprobs=())


async def _after(first: Delta | None, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
    if first is not None:
        yield first
    async for delta in deltas:
        yield delta
