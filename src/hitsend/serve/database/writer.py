"""The one writer: many operations, one transaction, one fsync.

Enters: operations, each a function of a connection, which the event loop doesn't run. Leaves: their results, once they
are durable (or only committed, where that is enough: `may_lag`). Always true: operations run in the order in which they
were submitted; when a group fails, each of its operations is tried once more, alone, so that a bad one ends nobody
else's; when the database was lost, the whole group is tried once more on a new connection, and a database that hangs is
not asked twice; an operation may run twice and must therefore be idempotent; one that was submitted runs even if nobody
waits for it any more. What is written at once (`at_once.py`) isn't submitted, and may be submitted after all. Next:
`usage/ledger.py`.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from hitsend.core.errors import StorageFailed
from hitsend.serve.database.connection import Database, DatabaseAway
from hitsend.serve.database.refused import reason_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")
Operation = Callable[[Connection], T]
Bulk = Callable[[Connection, Sequence[A]], list[T]]
"""One function for all arguments that a group brings for it: a few statements instead of some for each."""

MAX_GROUP = 256
"""Operations per transaction: bounds how long one commit can make the next one wait."""


GATHER_S = 0.004
PATIENCE = 8
"""Operations that came during another one's commit show that there are several clients: for that many groups each then
waits so long for others before it begins, because a commit costs nearly the same for one as for twenty. A lone client's
operations come one after the other, and never wait; what nobody waits for (`is_aside`) shows nothing."""


class _Item:
    """An operation, or a bulk with its argument, and the place where the result goes."""

    __slots__ = ("argument", "bulk", "future", "is_aside", "may_lag", "operation")

    def __init__(
        self,
        future: asyncio.Future[Any],
        operation: Operation[Any] | None = None,
        bulk: Bulk[Any, Any] | None = None,
        argument: Any = None,
        *,
        may_lag: bool = False,
        is_aside: bool = False,
    ) -> None:
        self.future = future
        self.may_lag = may_lag
        self.is_aside = is_aside
        self.operation = operation
        self.bulk = bulk
        self.argument = argument


class Writer:
    """A queue, and the task that empties it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_waiting = 0
        self._patience = 0
        self.num_commits = 0
        self.num_operations = 0

    def start(self) -> None:
        """Begin to write. Needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="database writer")

    async def stop(self) -> None:
        """Write what was submitted, then end. Safe to call twice."""
        self._is_closed = True
        if self._task is not None:
            self._queue.put_nowait(None)
            await self._task
            self._task = None

    @property
    def backlog(self) -> int:
        """Operations that wait for their transaction."""
        return self._queue.qsize()

    def submit(self, operation: Operation[T]) -> asyncio.Future[T]:
        """Queue an operation now, without waiting. The future has its result once committed, or StorageFailed."""
        item = _Item(asyncio.get_running_loop().create_future(), operation=operation)
        self._put(item)
        return item.future

    def submit_bulk(
        self, bulk: Bulk[A, T], argument: A, *, may_lag: bool = False, is_aside: bool = False
    ) -> asyncio.Future[T]:
        """Queue one argument of a bulk. It runs where the first of its group stands: it may not need one before it.

        What `may_lag` must survive the death of any process, but not a power cut: a group of nothing else is committed
        without waiting for the disk. The next commit that waits takes it along. `is_aside`: no request waits for it.
        """
        future = asyncio.get_running_loop().create_future()
        item = _Item(future, bulk=bulk, argument=argument, may_lag=may_lag, is_aside=is_aside)
        self._put(item)
        return item.future

    def write_at_once(self, statement: str, values: Sequence[Any]) -> bool | None:
        """See `Database.write_at_once`: for who is alone. Several clients share transactions instead, so None."""
        if self._is_closed or self._patience or not self._queue.empty():
            return None
        has_written = self._database.write_at_once(statement, values)
        self.num_commits += has_written is not None
        self.num_operations += has_written is not None
        return has_written

    def _put(self, item: _Item) -> None:
        if self._is_closed:
            item.future.set_exception(StorageFailed("the database is closed: the server is shutting down"))
        else:
            self._num_waiting += not item.is_aside
            self._queue.put_nowait(item)
        item.future.add_done_callback(_look_at)

    async def _run(self) -> None:
        loop, took_s = asyncio.get_running_loop(), 0.0
        while (item := await self._queue.get()) is not None:
            if self._patience:
                await asyncio.sleep(max(0.0, GATHER_S - took_s))  # a slow commit has gathered them already
            group = [item]
            while len(group) < MAX_GROUP and not self._queue.empty():
                following = self._queue.get_nowait()
                if following is None:
                    self._queue.put_nowait(None)
                    break
                group.append(following)
            num_waiting = sum(not one.is_aside for one in group)
            self._num_waiting -= num_waiting
            began = loop.time()
            await self._write(group)
            took_s = loop.time() - began
            self._patience = PATIENCE if num_waiting and self._num_waiting else max(0, self._patience - 1)

    async def _write(self, group: list[_Item]) -> None:
        error = await self._commit(group)
        if isinstance(error, DatabaseAway) and not error.is_silent:
            error = await self._commit(group)
        left = deque(group if error is not None else ())
        while left and not isinstance(error, DatabaseAway):
            failure = await self._commit([left[0]])
            if isinstance(failure, DatabaseAway):
                error = failure
                break
            alone = left.popleft()
            if failure is not None:
                if reason_of(failure) is None:  # else it was said, for all of them
                    logger.error("a write to the database failed twice", exc_info=failure)
                _give_up(alone, failure)
        if isinstance(error, DatabaseAway):
            self._give_up_all(left, error)

    def _give_up_all(self, left: deque[_Item], error: DatabaseAway) -> None:
        """Nobody waits once more for a database that is away; and so that a stop ends, neither does who comes next."""
        while self._is_closed and not self._queue.empty():
            if (item := self._queue.get_nowait()) is not None:
                left.append(item)
        if self._is_closed:
            self._queue.put_nowait(None)
        logger.error("%d writes could not be made: %s", len(left), error)
        for item in left:
            _give_up(item, error)

    async def _commit(self, group: list[_Item]) -> BaseException | None:
        """What went wrong. Whatever an operation raises, nothing but a cancellation of the writer itself ends that."""
        try:
            results = await self._transact(group)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return error
        except Exception as error:  # noqa: BLE001  # an operation's own
            return error
        self.num_commits += 1
        self.num_operations += len(group)
        for item, result in zip(group, results, strict=True):
            if not item.future.done():
                item.future.set_result(result)
        return None

    async def _transact(self, group: list[_Item]) -> list[Any]:
        may_lag = all(item.may_lag for item in group)
        return await self._database.write(partial(_run, group=group), may_lag=may_lag)


def _run(connection: Connection, group: Sequence[_Item]) -> list[Any]:
    """All of it, without the event loop: on SQLite one job of its thread, so nobody's write lock waits for a turn."""
    bulks = _bulks(group)
    results: dict[int, Any] = {}
    for item in group:
        if item.operation is not None:
            results[id(item)] = item.operation(connection)
        elif item.bulk is not None and id(item) not in results:
            together = bulks[item.bulk]
            done = item.bulk(connection, [one.argument for one in together])
            results |= {id(one): result for one, result in zip(together, done, strict=True)}
    return [results[id(item)] for item in group]


def _bulks(group: Sequence[_Item]) -> dict[Bulk[Any, Any], list[_Item]]:
    found: dict[Bulk[Any, Any], list[_Item]] = {}
    for item in group:
        if item.bulk is not None:
            found.setdefault(item.bulk, []).append(item)
    return found


def _give_up(item: _Item, error: BaseException) -> None:
    if not item.future.done():
        failure = StorageFailed("the database did not take the write", retry_after_s=1.0)
        failure.__cause__ = error
        item.future.set_exception(failure)


def _look_at(future: asyncio.Future[Any]) -> None:
    """Somebody may have stopped waiting: an error nobody reads was logged already and is not reported again."""
    if not future.cancelled():
        future.exception()
