"""Runs batches: finds one that nobody runs, works off its lines, ends it.

Enters: batches in the database. Leaves: the same, ended. Always true: everything that a restart needs is in the
database before it counts: a line is done when its answer is kept, and begins only after one look at what stands of it,
under a request id that the ledger takes once. So a line that a crash cut off begins anew: under the same id where
nothing was held, under the next where a row stands, and unbilled where that row has tokens. Next: `ending.py`.
"""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import LimitError, NotFound, ServeError, StorageFailed
from hitsend.core.request import Principal
from hitsend.serve.batching.again import pause_s
from hitsend.serve.batching.ending import Ending, answer_line
from hitsend.serve.batching.gate import Gate
from hitsend.serve.batching.input import Limits, Line, check, lines, parse, wants
from hitsend.serve.batching.line import Answered, LineRunner, Paid
from hitsend.serve.usage.batches import Batch, BatchStore, Fault
from hitsend.serve.usage.files import FileStore, Whose

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the database is looked at for batches, and a running one for its end."""
PRUNE_S = 600.0
MAX_BATCHES = 8
"""At once, per process; their lines share the gate."""
MAX_LINES = 64
"""Of one batch, under way or waiting to be tried again."""
MAX_TRIES = 20
"""Request ids of one line."""
RETRY_S = 30.0
"""Until a batch that could not go on is tried again."""
HELD_S = 0.25
ALL = Whose(None, sees_all=True)


class BatchRunner:
    """The batches of this process."""

    def __init__(
        self,
        files: FileStore,
        batches: BatchStore,
        runner: LineRunner,
        gate: Gate,
        *,
        clock: Clock,
        limits: Limits,
        owner: str,
        drafts_of: Callable[[str | None], Sequence[str]] = lambda _model: (),
    ) -> None:
        """`drafts_of`: a model's engines whose drafts its callers pay for."""
        self._files = files
        self._batches = batches
        self._lines = runner
        self._gate = gate
        self._clock = clock
        self._limits = limits
        self._owner = owner
        self._drafts_of = drafts_of
        self._ending = Ending(files, batches, limits)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._retry_at: dict[str, float] = {}
        self._stirred = asyncio.Event()
        self._renewed_at = self._pruned_at = clock.now()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run batches in the background. The stores must run."""
        self._task = asyncio.create_task(self._run(), name="batches")

    async def stop(self) -> None:
        """Cancel what runs (it goes on after the next start) and let others have it. Safe to call twice."""
        if self._task is None:
            return
        tasks = [self._task, *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        self._task = None
        for batch_id in self._running:
            with contextlib.suppress(StorageFailed):
                await self._batches.release(self._owner, batch_id)
        self._running.clear()

    def wake(self) -> None:
        """Look at the database now."""
        self._stirred.set()

    async def _run(self) -> None:
        while True:
            self._stirred.clear()
            self._reap()
            try:
                await self._tend()
                while len(self._running) < MAX_BATCHES and (batch := await self._claim()) is not None:
                    self._running[batch.batch_id] = asyncio.create_task(self._work(batch), name=batch.batch_id)
            except StorageFailed as error:
                logger.warning("batches can't be tended now (%s): will try again", error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stirred.wait()

    async def _claim(self) -> Batch | None:
        now = self._clock.now()
        paused = [batch_id for batch_id, at in self._retry_at.items() if at > now]
        return await self._batches.claim(self._owner, [*self._running, *paused])

    async def _tend(self) -> None:
        """Keep the leases, and let go of what isn't this process's any more."""
        now, lease_s = self._clock.now(), self._batches.lease_s
        if now - self._pruned_at >= PRUNE_S:
            self._pruned_at = now
            await self._batches.prune()
        if not self._running:
            self._renewed_at = now
        elif now - self._renewed_at >= lease_s / 3:
            try:
                own = await self._batches.renew(self._owner)
            except StorageFailed:
                own = frozenset(self._running) if now - self._renewed_at < lease_s else frozenset()
            else:
                self._renewed_at = now
            for batch_id in self._running.keys() - own:
                self._running[batch_id].cancel()

    def _reap(self) -> None:
        for batch_id, task in list(self._running.items()):
            if task.done():
                del self._running[batch_id]

    async def _work(self, batch: Batch) -> None:
        """One batch, to its end or to where it can't go on for now."""
        try:
            await self._to_its_end(batch)
        except Exception as error:  # one batch's trouble is not the others'
            self._retry_at[batch.batch_id] = self._clock.now() + RETRY_S
            stack = None if isinstance(error, ServeError | OSError) else error
            logger.warning(
                "%s can't go on now (%s): will try again", batch.batch_id, type(error).__name__, exc_info=stack
            )
            with contextlib.suppress(StorageFailed):
                await self._batches.release(self._owner, batch.batch_id)
        finally:
            self.wake()

    async def _to_its_end(self, batch: Batch) -> None:
        if batch.status == "validating" and not self._is_late(batch):
            batch = await self._checked(batch)
        if batch.status == "in_progress" and not self._is_late(batch):
            await self._all_lines(batch)
            batch = await self._batches.get(batch.batch_id, ALL)
        if batch.status == "cancelling":
            await self._ending.end(batch, "cancelled")
        elif batch.status == "in_progress" and not await self._is_complete(batch):
            await self._ending.end(batch, "expired")
        elif batch.status in ("in_progress", "finalizing"):
            await self._batches.finalize(batch.batch_id)
            await self._ending.end(batch, "completed")
        elif batch.status == "validating":
            await self._ending.end(batch, "expired")

    async def _is_complete(self, batch: Batch) -> bool:
        return len(await self._batches.done(batch.batch_id)) >= batch.num_lines

    def _is_late(self, batch: Batch) -> bool:
        return self._clock.wall() >= batch.expires_at

    async def _checked(self, batch: Batch) -> Batch:
        try:
            await self._files.get(batch.input_file_id, ALL)
        except NotFound as error:
            fault = Fault("file_not_found", error.message, None, "input_file_id")
            await self._batches.refuse(batch.batch_id, (fault,), 0)
            return await self._batches.get(batch.batch_id, ALL)
        path = self._files.path(batch.input_file_id)
        found = await asyncio.to_thread(check, path, batch.endpoint, self._limits)
        if found.faults:
            await self._batches.refuse(batch.batch_id, found.faults, found.num_lines)
        else:
            await self._batches.begin(batch.batch_id, found.num_lines)
        return await self._batches.get(batch.batch_id, ALL)

    async def _all_lines(self, batch: Batch) -> None:
        """Those that aren't done, some at a time. Ends early when no further one may begin."""
        done = await self._batches.done(batch.batch_id)
        caller = msgspec.json.decode(batch.caller, type=Principal)
        work = _Work(batch, caller)
        room = asyncio.Semaphore(MAX_LINES)
        watching = asyncio.create_task(self._watch(work))
        try:
            with self._files.path(batch.input_file_id).open("rb") as opened:
                async with asyncio.TaskGroup() as group:
                    for number, line in _left(opened, self._limits.max_line_bytes, done):
                        await room.acquire()
                        if work.is_halted:
                            break
                        task = group.create_task(self._line(work, number, line))
                        task.add_done_callback(lambda _: room.release())
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self, work: "_Work") -> None:
        """Tell lines that wait that they wait in vain."""
        while not work.is_halted:
            with contextlib.suppress(StorageFailed):
                batch = await self._batches.get(work.batch.batch_id, ALL)
                if batch.status != "in_progress" or self._is_late(batch):
                    work.halted.set()
            if not self._lines.is_known(work.caller):
                work.is_hopeless = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await work.halted.wait()

    async def _line(self, work: "_Work", number: int, line: Line) -> None:
        """One line until its answer is kept, or until it may not begin any more."""
        asked, num_fails = wants(line), 0
        model = asked.model if isinstance(asked.model, str) else None
        weight = asked.n if isinstance(asked.n, int) and asked.n > 0 else 1
        while True:
            await work.pause(work.open_at - self._clock.now())
            async with self._gate.place(model, weight, lambda: work.is_halted):
                begun = await self._begin(work, number, self._drafts_of(model))
                if begun is None:
                    return
                answered = await self._lines.run(line, begun.request_id, work.caller, begun.paid)
            again_s = pause_s(answered.error, num_fails, work.batch.expires_at - self._clock.wall())
            if again_s is None:
                await self._keep(work, number, line.custom_id, begun.request_id, answered)
                return
            num_fails += 1
            if isinstance(answered.error, LimitError):
                work.open_at = self._clock.now() + again_s  # what one line meets, the others would meet, too
            else:
                await work.pause(again_s)

    async def _begin(self, work: "_Work", number: int, drafts: Sequence[str]) -> "_Begun | None":
        """The id to run it under; None where it is done, or may not begin any more."""
        batch_id = work.batch.batch_id
        names = [f"{batch_id}-{number}", *(f"{batch_id}-{number}-{again}" for again in range(2, MAX_TRIES + 1))]
        while not work.is_halted:
            try:
                seen = await self._batches.look(batch_id, number, names, drafts)
            except StorageFailed:
                await work.pause(LOOK_S)
                continue
            if seen.is_done or seen.status != "in_progress" or self._is_late(work.batch):
                return None
            if not seen.is_held:
                free = next((name for name in names if name not in seen.used), None)
                paid = Paid(seen.is_billed, seen.paid_drafts)
                return _Begun(free or f"{names[-1]}-{self._clock.wall():.0f}", paid)
            await work.pause(HELD_S)  # a process that died, or is dying, holds it still: the ledger ends that
        return None

    async def _keep(self, work: "_Work", number: int, custom_id: str, request_id: str, answered: Answered) -> None:
        """Keep the answer, as long as that takes: what was billed shall not be lost."""
        error = answered.error
        response: dict[str, Any] = {"status_code": answered.status, "request_id": request_id}
        response["body"] = msgspec.Raw(answered.body)
        told = None if error is None else {"code": error.code, "message": error.message}
        body = answer_line(work.batch.batch_id, number, custom_id, response, told)
        packed = zlib.compress(
            body, 1
        )  # at once: from here on a stop can't lose it, because what is submitted is written
        while True:
            try:
                await self._batches.put(work.batch.batch_id, number, packed, is_failed=error is not None)
            except StorageFailed:
                await asyncio.sleep(LOOK_S)
            else:
                return


class _Begun(msgspec.Struct, frozen=True):
    """A line that may begin, and what of it stands in rows already."""

    request_id: str
    paid: Paid


class _Work:
    """One batch under way."""

    def __init__(self, batch: Batch, caller: Principal) -> None:
        self.batch = batch
        self.caller = caller
        self.halted = asyncio.Event()
        self.open_at = 0.0
        """Until then its caller's limits have no room, by the clock's `now`."""
        self.is_hopeless = False
        """Its caller is nobody any more: whatever it waits for, there is no use in it."""

    @property
    def is_halted(self) -> bool:
        """Whether no further line may begin."""
        return self.halted.is_set()

    async def pause(self, seconds: float) -> None:
        """Wait, unless it is halted; not for long where it is hopeless."""
        seconds = min(seconds, HELD_S) if self.is_hopeless else seconds
        while seconds > 0 and not self.is_halted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, LOOK_S)):
                    await self.halted.wait()
            seconds = 0.0 if self.is_hopeless else seconds - LOOK_S


def _left(opened: Any, most: int, done: frozenset[int]) -> Iterator[tuple[int, Line]]:
    """The lines that aren't done; `check` saw all of them."""
    for number, raw in lines(opened, most):
        if raw and number not in done:
            yield number, parse(raw)
