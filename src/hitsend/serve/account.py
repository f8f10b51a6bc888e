"""The hold as a `with` block: taken on entry, settled exactly once on exit, whatever ended the block.

Enters: what to reserve; then the running generation and the assemblers of its choices. Leaves: one ledger row, and the
request's usage and cost in its flight record. Always true: what is billed comes from the engine's own counts, read
after the engine has let go of the request, which it is made to do here; a block that ends by an error or a cancellation
bills what was really computed until then; once the end has begun, nothing cuts it off, however often the request is
cancelled (a write to a client that left fails, and then the watch over the client cancels what is ending already).
Next: `access/`.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from hitsend.core.clock import Clock
from hitsend.core.errors import ClientGone, Ended, LimitError, ServeError, StorageFailed
from hitsend.core.events import ChoiceFinished, LimitsChecked, Reserved, Settled
from hitsend.core.record import Flight
from hitsend.core.request import Delta, Usage
from hitsend.serve.access.quota import Ask, Quota, Used
from hitsend.serve.engine.protocol import ChoiceDone, Generation, Produced, PromptScored, Tokens
from hitsend.serve.output.assemble import Assembler
from hitsend.serve.output.passed import PassedChoice
from hitsend.serve.usage.ledger import Ledger, Settlement
from hitsend.serve.usage.meter import ChoiceCounts, Metered, Outcome, PromptCounts, meter
from hitsend.serve.usage.pricing import cost_microusd, held_microusd
from hitsend.serve.usage.rows import Hold, HoldRequest

logger = logging.getLogger(__name__)

_NOTHING = Produced(prompt_tokens=0, output_tokens=())


class Account:
    """One request's hold and bill. `input_param`: the field to blame when the input alone is more than a limit.
    `is_streamed`: some of the answer leaves before its row is there, once `secured` has returned."""

    def __init__(
        self,
        ledger: Ledger,
        request: HoldRequest,
        flight: Flight,
        clock: Clock,
        *,
        quota: Quota,
        input_param: str = "messages",
        is_streamed: bool = False,
    ) -> None:
        self._ledger = ledger
        self._is_streamed = is_streamed
        self._securing: asyncio.Future[None] | None = None
        self._quota = quota
        self._input_param = input_param
        self._is_counted = False
        self._request = request
        self._flight = flight
        self._clock = clock
        self._hold: Hold | None = None
        self._generation: Generation | None = None
        self._choices: Sequence[Assembler | PassedChoice] = ()

    async def __aenter__(self) -> Self:
        """Reserve: first what counts in memory, then the durable hold. Raises what `Quota.reserve` and `Ledger.reserve`
        raise; then nothing is held anywhere."""
        await self._reserve_limits()
        try:
            self._hold = await self._ledger.reserve(self._request)
        except BaseException:
            await to_its_end(self._give_back(Used(requests=0)))
            raise
        self._record_hold(self._hold)
        if self._is_streamed:
            self._securing = asyncio.ensure_future(self._ledger.secure())
            self._securing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self

    async def secured(self) -> None:
        """Return when the hold survives a power cut, if what is streamed leaves before its row is there.

        The disk is waited for while the engine works. Raises StorageFailed."""
        if self._securing is not None:
            await asyncio.shield(self._securing)

    def _record_hold(self, hold: Hold) -> None:
        request = hold.request
        self._flight.record(
            Reserved(
                hold_id=hold.hold_id,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                held_microusd=hold.held_microusd,
                price_id=request.price.id,
            )
        )

    async def _reserve_limits(self) -> None:
        request = self._request
        levels = request.principal.levels
        if not levels:
            return
        held = held_microusd(request.price, request.input_tokens, request.output_tokens)
        ask = Ask(
            request.request_id, levels, request.input_tokens, request.output_tokens, held, input_param=self._input_param
        )
        try:
            left = await self._quota.reserve(ask)
            self._is_counted = True
        except LimitError as error:
            if error.windows is not None:
                self._flight.record(LimitsChecked(error.windows.uses))
            raise
        self._flight.windows = left
        self._flight.record(LimitsChecked(left.uses))

    async def _give_back(self, used: Used) -> None:
        if self._is_counted:
            self._is_counted = False
            await self._quota.settle(self._request.request_id, used)

    def watch(self, generation: Generation, choices: Sequence[Assembler | PassedChoice]) -> None:
        """Bill this generation, and close it at the block's end; without it the hold is settled with nothing used."""
        self._generation, self._choices = generation, choices

    @property
    def is_watching(self) -> bool:
        """Whether an engine works for it."""
        return self._generation is not None

    @property
    def generation(self) -> Generation:
        """The one that is billed."""
        assert self._generation is not None
        return self._generation

    async def abandon(self, reason: str, *, bills: bool = False) -> Settlement:
        """Make the engine let go before the client got anything: what it computed isn't this hold's, but for the limits
        where the caller `bills`. Returns what that was; `move` goes on.
        """
        usage, discarded, is_estimate = Usage(), 0, False
        if self._generation is not None:
            await self._generation.aclose()
            await self._read_the_rest()
            metered = self._metered("cancelled")
            usage, discarded, is_estimate = metered.usage, metered.discarded_tokens, self._is_estimate
        cost = cost_microusd(self._request.price, usage) if bills else 0
        billed = usage if bills else Usage()
        await self._give_back(Used(billed.prompt_tokens, billed.completion_tokens, cost, requests=0))
        self._generation, self._choices = None, ()
        return Settlement(usage, reason, discarded, is_estimate)

    async def move(self, request: HoldRequest) -> None:
        """Hold for another engine: the limits anew, while the durable hold stays and will end in that one's row.

        Raises as entering does; then the limits hold nothing."""
        assert self._hold is not None
        self._request = request
        await self._reserve_limits()
        try:
            self._hold = await self._ledger.move(self._hold, request)
        except BaseException:
            await to_its_end(self._give_back(Used(requests=0)))
            raise
        self._record_hold(self._hold)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the engine let go, then settle with what was really computed."""
        await to_its_end(self._end(error))

    async def _end(self, error: BaseException | None) -> None:
        try:
            await self._settle(error)
        finally:
            await self._give_back(Used())  # for when settling broke before it knew the counts

    async def _settle(self, error: BaseException | None) -> None:
        assert self._hold is not None
        if self._generation is not None:
            await self._generation.aclose()
        outcome, reason = self._ending(error)
        metered = self._metered(outcome)
        started_at = self._clock.now()
        settlement = Settlement(
            metered.usage, reason, discarded_tokens=metered.discarded_tokens, is_estimate=self._is_estimate
        )
        writing = self._ledger.settle(self._hold, settlement)  # before all that could fail: now nothing can lose it
        cost = cost_microusd(self._request.price, metered.usage)
        await self._give_back(Used(metered.usage.prompt_tokens, metered.usage.completion_tokens, cost))
        await self._read_the_rest()
        self._note_choices(reason)
        self._flight.usage = metered.usage
        self._flight.finish_reason = self._flight.finish_reason or reason
        try:
            row = await writing
            self._flight.ledger = row
        except StorageFailed:
            logger.warning("request %s: its row is owed and will be written later", self._request.request_id)
        self._record(started_at, metered.usage, cost, reason)

    async def _read_the_rest(self) -> None:
        """A request that was cut off left events unread: they belong into its record. Never waits: it is closed."""
        if self._generation is None:
            return
        async for event in self._generation:
            if not isinstance(event, Tokens | PromptScored | ChoiceDone | Delta):
                self._flight.record(event)

    def _ending(self, error: BaseException | None) -> tuple[Outcome, str]:
        if error is None:
            reasons = {str(choice.finish_reason) for choice in self._choices}
            return "completed", "mixed" if len(reasons) > 1 else "".join(reasons) or "stop"
        known = self._flight.error or (error if isinstance(error, ServeError) else None)
        if known is None:
            known = ClientGone("the client closed the connection")
            known = known if isinstance(error, asyncio.CancelledError | GeneratorExit) else ServeError("internal error")
        self._flight.fail(known)
        return ("cancelled" if isinstance(known, Ended) else "failed"), known.code

    @property
    def _is_estimate(self) -> bool:
        return self._generation is not None and self._generation.produced.is_estimate

    def _metered(self, outcome: Outcome) -> Metered:
        produced = self._generation.produced if self._generation is not None else _NOTHING
        if produced.usage is not None:  # an upstream's own bill: what it charges is what is charged here
            return Metered(produced.usage, 0)
        prompt = PromptCounts(self._request.input_tokens, produced.prompt_tokens, produced.cached_tokens)
        counts = tuple(
            ChoiceCounts(tokens, choice.num_tokens if choice.is_finished else None, choice.num_reasoning_tokens)
            for tokens, choice in zip(produced.output_tokens, self._choices, strict=False)
        )
        return meter(outcome, prompt, counts)

    def _note_choices(self, reason: str) -> None:
        produced = self._generation.produced.output_tokens if self._generation is not None else ()
        for index, (choice, tokens) in enumerate(zip(self._choices, produced, strict=False)):
            billed = min(tokens, choice.num_tokens) if choice.is_finished else tokens
            ending = str(choice.finish_reason or reason)
            self._flight.record(ChoiceFinished(index, ending, billed, tokens - billed))

    def _record(self, started_at: float, usage: Usage, cost: int, reason: str) -> None:
        assert self._hold is not None
        self._flight.record(
            Settled(
                started_at=started_at,
                ended_at=self._clock.now(),
                hold_id=self._hold.hold_id,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cost_microusd=cost,
                reason=reason,
            )
        )


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work, however often the waiter is cancelled meanwhile; that cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    interrupted: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            interrupted = error
    task.result()
    if interrupted is not None:
        raise interrupted
