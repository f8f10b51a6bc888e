"""Limits counted in Valkey or Redis, for several gateways: what `memory.py` is for one.

Enters: an `Ask`; later what it really used. Leaves: what is left of the rates, or a refusal. Always true: one script
looks and takes, by the server's clock; what a gateway that died held is released when its lease is over; a hold whose
taking or ending wasn't answered is ended when the server is back, once; while it is away each kind of limit is open or
closed as the settings say. Next: `scripts.py`, `lua/`.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence
from functools import partial

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest, StorageFailed
from hitsend.core.limits import MAX_PER_MINUTE, Level, RateWindows
from hitsend.serve.access import limits
from hitsend.serve.access.limits import Counters, Moment, Pair, day_text, first_of_month, rates_of
from hitsend.serve.access.outage import Outage, Owed, UnreachablePolicy
from hitsend.serve.access.quota import Ask, QuotaHealth, Spent, Used
from hitsend.serve.access.scripts import Away, Reply, ScriptName, Scripts
from hitsend.settings import AccessSettings

logger = logging.getLogger(__name__)

RETRY_S = 0.25
"""How often it is looked whether the server is back."""

ATTEMPTS = 20
"""Times that one request starts over, because spending had to be read, or its gateway's lease was over."""

MOST_MONEY = 10**15 + 1
"""What is sent of an amount that no budget can hold: one more than the highest budget."""

AT_ONCE = 100


class _Hold(msgspec.Struct, frozen=True):
    ask: Ask
    epoch: str


class ValkeyQuota:
    """The `Quota` of gateways that share one server. For one event loop; `start` it first."""

    def __init__(self, scripts: Scripts, clock: Clock, spent: Spent, lease_s: float, policy: UnreachablePolicy) -> None:
        self._scripts = scripts
        self._spent = spent
        self._lease_us = round(lease_s * 1_000_000)
        self.outage = Outage(clock, policy, retry_s=RETRY_S)
        self._epoch = ""
        self._open: dict[str, _Hold] = {}
        self._seeding: dict[str, asyncio.Task[None]] = {}
        self._reviving: asyncio.Task[None] | None = None
        self._leftover: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Reservations of this gateway that haven't ended."""
        return len(self._open) + self.outage.num_open

    @property
    def num_levels(self) -> int:
        """Levels that take up memory in this process: only those counted while the server was away."""
        return self.outage.num_levels

    async def start(self) -> None:
        """Begin to hold a lease, and to renew it. A server that is away is waited for in the background."""
        self._scripts.start()
        await self._look()
        self._keeping = asyncio.create_task(self._keep(), name="valkey lease")

    async def stop(self) -> None:
        """Let go; what is still held ends with the lease."""
        tasks = [task for task in (self._keeping, self._reviving, *self._seeding.values(), *self._leftover) if task]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._scripts.stop()

    async def reserve(self, ask: Ask) -> RateWindows:
        """Take it, on every level at once."""
        task = asyncio.create_task(self._reserve(ask, is_preview=False), name="reserve")
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self._abandoned, ask))
            raise

    async def preview(self, ask: Ask) -> RateWindows:
        """What `reserve` would return or raise now."""
        return await self._reserve(ask, is_preview=True)

    async def settle(self, request_id: str, used: Used) -> None:
        """End the reservation. Never raises: what can't be told now is told when the server is back."""
        if self.outage.settle(request_id, used, self._scripts.last_us):
            self._hurry.set()
            return
        while self._reviving is not None:
            await asyncio.wait({self._reviving})
        hold = self._open.pop(request_id, None)
        if hold is not None:
            await self._settle(hold, used)

    async def shed(self, levels: Sequence[Level]) -> None:
        """Nothing: what is left is known on the server only, and `reserve` asks there."""

    def health(self) -> QuotaHealth:
        """Whether the server answers, and what its outages have led to."""
        outage = self.outage
        return QuotaHealth(not outage.is_on, outage.num_outages, outage.num_unchecked, outage.num_refused)

    def _abandoned(self, ask: Ask, task: "asyncio.Task[RateWindows]") -> None:
        """Its client left while it was being reserved."""
        if task.cancelled() or task.exception() is not None:
            return
        ending = asyncio.create_task(self.settle(ask.request_id, Used(requests=0)), name="abandoned")
        self._leftover.add(ending)
        ending.add_done_callback(self._leftover.discard)

    async def _reserve(self, ask: Ask, *, is_preview: bool) -> RateWindows:
        if ask.request_id in self._open or self.outage.holds(ask.request_id):
            raise _in_use(ask)
        for _ in range(ATTEMPTS):
            epoch = self._epoch
            try:
                reply = await self._call("reserve", epoch, ask, _reserve_args(ask, is_preview=is_preview))
                if reply.word == "seed":
                    await self._seed(ask, reply)
                elif reply.word == "lost":
                    await self._revive()
                elif reply.word != "late":
                    return self._answered(_Hold(ask, epoch), reply, is_preview=is_preview)
            except Away as error:
                if error.was_sent and not is_preview:
                    self.outage.owe(ask, Used(requests=0), epoch, self._scripts.last_us)
                return self.outage.reserve(ask, is_preview=is_preview)
        raise StorageFailed("what the limits' levels have spent can't be kept on their server", retry_after_s=1.0)

    def _answered(self, hold: _Hold, reply: Reply, *, is_preview: bool) -> RateWindows:
        ask = hold.ask
        if reply.word == "twice":
            raise _in_use(ask)
        pairs = [(level, _counters(state)) for level, state in zip(ask.levels, reply.rest, strict=True)]
        if reply.word == "no":
            raise _refused(pairs, ask, reply.now_us)
        if not is_preview:
            self._open[ask.request_id] = hold
        return limits.windows(pairs, ask, is_taken=True)

    async def _settle(self, hold: _Hold, used: Used) -> None:
        since_us = self._scripts.last_us
        try:
            reply = await self._end(hold, used, None)
            if reply.word == "lost":  # emptied, or lost long ago: hold it again, so that its cost is counted there
                await self._revive()
                before, hold = hold, msgspec.structs.replace(hold, epoch=self._epoch)
                await self._rehold(before, self._epoch)
                reply = await self._end(hold, used, None)
            if reply.word != "late":
                return
        except Away:
            pass
        self.outage.owe(hold.ask, used, hold.epoch, since_us)
        self._hurry.set()

    async def _end(self, hold: _Hold, used: Used, since_us: int | None) -> Reply:
        return await self._call("settle", hold.epoch, hold.ask, _settle_args(hold.ask, used, since_us))

    async def _call(self, name: ScriptName, epoch: str, ask: Ask, args: list[str | int]) -> Reply:
        if self.outage.is_on:
            raise Away("away", was_sent=False)
        return await self._called(name, epoch, _keys(epoch, ask.levels), args)

    async def _called(self, name: ScriptName, epoch: str, keys: Sequence[str], args: Sequence[str | int]) -> Reply:
        try:
            return await self._scripts.call(name, epoch, keys, args)
        except Away as error:
            if not self._scripts.is_stopping:
                self.outage.begin(str(error))
                self._hurry.set()
            raise

    async def _seed(self, ask: Ask, reply: Reply) -> None:
        """Tell the server what the ledger has. Raises what `Spent` raises, and Away."""
        for index, day, mark in reply.rest:
            level = ask.levels[index]
            key = _key(level)
            task = self._seeding.get(key)
            if task is None:
                task = self._seeding[key] = asyncio.create_task(self._load(level, day, mark), name="spent")
                task.add_done_callback(partial(self._loaded, key))
            await asyncio.shield(task)  # others may wait for it too

    async def _load(self, level: Level, day: int, mark: int) -> None:
        month = await self._spent.spent_microusd(level, day_text(first_of_month(day)))
        today = await self._spent.spent_microusd(level, day_text(day))
        epoch = self._epoch
        await self._called("seed", epoch, _keys(epoch, (level,)), (mark, day, today, month))

    def _loaded(self, key: str, task: "asyncio.Task[None]") -> None:
        del self._seeding[key]
        if not task.cancelled():
            task.exception()  # told to those who wait

    async def _keep(self) -> None:
        while True:
            waited_s = RETRY_S if self.outage.is_on else self._lease_us / 3_000_000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waited_s):
                    await self._hurry.wait()
            if self._hurry.is_set():
                self._hurry.clear()
                await asyncio.sleep(min(RETRY_S, self._scripts.timeout_s))
            await self._look()

    async def _look(self) -> None:
        """Renew the lease; after an outage hold again what runs, and tell what was owed."""
        try:
            epoch = self._epoch
            keys = (f"holds:{epoch}",)
            if not epoch or (await self._called("renew", epoch, keys, (self._lease_us, "0"))).word == "lost":
                await self._revive()
            await self._pay()
            if self.outage.is_on:
                self.outage.end()
        except Away:
            return

    async def _pay(self) -> None:
        """Holds that ended meanwhile, and costs that nobody counted. What isn't answered stays owed."""
        # a call that was given up does nothing any more after its caller's time: then taking it back is for good
        await asyncio.sleep(self._scripts.timeout_s if self.outage.owed else 0)
        while self.outage.owed:
            some = [self.outage.owed.popleft() for _ in range(min(AT_ONCE, len(self.outage.owed)))]
            paid = await asyncio.gather(*(self._paid(owed) for owed in some))
            self.outage.owed.extendleft(owed for owed, is_paid in zip(some, paid, strict=True) if not is_paid)
            if self.outage.is_on and not all(paid):
                raise Away("away again", was_sent=True)
        while self.outage.charges:
            charge = self.outage.charges[0]
            args = (charge.number, min(charge.cost_microusd, MOST_MONEY), charge.since_us)
            reply = await self._called("charge", self._epoch, _keys(self._epoch, charge.levels), args)
            if reply.word == "lost":
                await self._revive()
            elif reply.word != "late" and self.outage.charges[0] is charge:
                self.outage.charges.popleft()

    async def _paid(self, owed: Owed) -> bool:
        keys, args = _keys(owed.epoch, owed.ask.levels), _settle_args(owed.ask, owed.used, owed.since_us)
        try:
            return (await self._called("settle", owed.epoch, keys, args)).word != "late"
        except Away:
            return False

    async def _revive(self) -> None:
        """Begin a new epoch, and hold again in it what still runs: once, however many find out that it is needed."""
        if self._reviving is None:
            self._reviving = asyncio.create_task(self._begin(), name="revive")
            self._reviving.add_done_callback(self._revived)
        await asyncio.shield(self._reviving)

    def _revived(self, task: "asyncio.Task[None]") -> None:
        self._reviving = None
        if not task.cancelled():
            task.exception()  # told to those who wait

    async def _begin(self) -> None:
        epoch = secrets.token_hex(8)
        await self._called("renew", epoch, (f"holds:{epoch}",), (self._lease_us, "1"))
        holds = list(self._open.items())
        for start in range(0, len(holds), AT_ONCE):
            some = holds[start : start + AT_ONCE]
            await asyncio.gather(*(self._rehold(hold, epoch) for _, hold in some))
            for request_id, hold in some:
                self._open[request_id] = msgspec.structs.replace(hold, epoch=epoch)
        self._epoch = epoch
        if holds:
            logger.warning("the limits' server had forgotten %d running requests; they are counted again", len(holds))

    async def _rehold(self, hold: _Hold, epoch: str) -> None:
        keys = (f"holds:{epoch}", f"holds:{hold.epoch}", *(_key(level) for level in hold.ask.levels))
        await self._called("rehold", epoch, keys, (hold.ask.request_id, min(hold.ask.held_microusd, MOST_MONEY)))


async def open_quota(settings: AccessSettings, clock: Clock, spent: Spent) -> ValkeyQuota:
    """The quota of a gateway, started. Raises ConfigError for a URL that can't be one; stop it in the end."""
    scripts = Scripts(str(settings.quota_url), settings.quota_prefix, settings.quota_timeout_s, clock)
    policy = UnreachablePolicy(settings.quota_unreachable_rates, settings.quota_unreachable_budgets)
    quota = ValkeyQuota(scripts, clock, spent, settings.quota_lease_s, policy)
    await quota.start()
    return quota


def _key(level: Level) -> str:
    return "level:" + msgspec.json.encode((level.kind, *level.path)).decode()


def _keys(epoch: str, levels: Sequence[Level]) -> tuple[str, ...]:
    return (f"holds:{epoch}", *(_key(level) for level in levels))


def _reserve_args(ask: Ask, *, is_preview: bool) -> list[str | int]:
    most = MAX_PER_MINUTE + 1  # more than any limit: what is sent must stay exact when it is multiplied
    tokens = (min(ask.input_tokens, most), min(ask.output_tokens, most))
    args: list[str | int] = [ask.request_id, *tokens, min(ask.held_microusd, MOST_MONEY), int(is_preview)]
    for level in ask.levels:
        args += ["" if limit is None else limit for limit in level.told]
    return args


def _settle_args(ask: Ask, used: Used, since_us: int | None) -> list[str | int]:
    unused = (1 - used.requests, ask.input_tokens - used.input_tokens, ask.output_tokens - used.output_tokens)
    exact = [max(-MAX_PER_MINUTE, min(MAX_PER_MINUTE, tokens)) for tokens in unused]
    money = (min(ask.held_microusd, MOST_MONEY), min(used.cost_microusd, MOST_MONEY))
    limited = ["".join("0" if rate is None else "1" for rate in rates_of(level.limits)) for level in ask.levels]
    return [ask.request_id, *exact, *money, "" if since_us is None else since_us, *limited]


def _counters(state: list[int]) -> Counters:
    at_us, day, *rest = state
    counters = Counters(Moment(at_us, day * limits.DAY_US))
    counters.missing, counters.rates = rest[:3], rest[3:6]
    counters.running, counters.held, counters.spent_day, counters.spent_month, seeded = rest[6:]
    counters.seeded_month = limits.month_of(day) if seeded else None
    return counters


def _refused(pairs: list[Pair], ask: Ask, now_us: int) -> Exception:
    """In the words of one process: the same arithmetic finds the same refusal in the counters that the script saw."""
    refusal = limits.check(pairs, ask, Moment(now_us, now_us))
    assert refusal is not None, "the script refused what fits"
    return limits.error_of(refusal, limits.windows(pairs, ask, is_taken=False), limits.param_of(refusal, ask))


def _in_use(ask: Ask) -> InvalidRequest:
    return InvalidRequest(f"request id {ask.request_id!r} is in use", param="x-request-id")
