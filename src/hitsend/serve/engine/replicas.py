"""Several servers with the same models: which of them a request goes to.

Enters: base URLs, what is running, and what each says of its load. Leaves: one `Replica` per attempt. Always true: one
that drains, whose breaker is open or whose own queue is full gets nothing; a conversation goes where its beginning was
computed as long as that server isn't clearly busier than the idlest; a repeated request goes to another one where there
is another; figures that are older than three polls count as unknown. Next: `openai.py`.
"""

import asyncio
import contextlib
import hashlib

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError, EngineUnavailable, ServeError, ServerOverloaded
from hitsend.serve.engine.breaker import Breaker, Outcome
from hitsend.serve.engine.gauges import MAX_METRICS_BYTES, Load, read_load
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.profiles import Profile
from hitsend.serve.engine.upstream import UpstreamLine
from hitsend.settings_upstreams import UpstreamBase

AFFINITY_SLACK = 4
"""Requests that a conversation's server may have more than the idlest, and still gets it."""
KEPT_POLLS = 3
_POLL_TIMEOUT_S = 2.0


_UNKNOWN = Load()


class Replica:
    """One server: its line, its breaker, what runs there."""

    def __init__(self, url: str, line: UpstreamLine, breaker: Breaker, *, is_draining: bool) -> None:
        self.url = url
        self.line = line
        self.breaker = breaker
        self.is_draining = is_draining
        self.running = 0
        self.load = Load()
        self.loaded_at: float | None = None
        self.is_thrashing = False

    def enter(self) -> int:
        """A request goes there; give what is returned back to `leave`."""
        self.running += 1
        return self.breaker.enter()

    def leave(self, ticket: int, outcome: Outcome) -> None:
        """It has ended there."""
        self.running -= 1
        self.breaker.leave(ticket, outcome)

    def note(self, load: Load, now: float) -> None:
        """A poll has come in. It thrashes while it preempts between two polls and requests wait."""
        before = self.load.preemptions
        self.is_thrashing = before is not None and (load.preemptions or 0) > before and bool(load.waiting)
        self.load, self.loaded_at = load, now


class Replicas:
    """All servers of one engine."""

    def __init__(
        self, settings: UpstreamBase, urls: tuple[str, ...], profile: Profile, clock: Clock, *, key: str | None
    ) -> None:
        self._settings = settings
        self._profile = profile
        self._clock = clock
        self._polling: asyncio.Task[None] | None = None
        self.all = tuple(self._replica(url, key) for url in urls)

    def _replica(self, url: str, key: str | None) -> Replica:
        settings = self._settings
        try:
            line = UpstreamLine(
                url, key, connect_timeout_s=settings.connect_timeout_s, stall_timeout_s=settings.stall_timeout_s
            )
        except ConfigError as error:
            raise ConfigError(f"engines[{settings.name}].{error}") from None
        breaker = Breaker(
            self._clock,
            failures=settings.breaker_failures,
            share=settings.breaker_share,
            open_s=settings.breaker_open_s,
        )
        return Replica(url, line, breaker, is_draining=url in settings.draining)

    def start(self) -> None:
        """Get ready, and poll from now on, where there is something to poll."""
        for one in self.all:
            one.line.start()
        if self._profile.metrics and self._settings.metrics_poll_s:
            self._polling = asyncio.create_task(self._poll(), name=f"metrics of {self._settings.name}")

    async def stop(self) -> None:
        """Safe to call twice."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait({self._polling})
            self._polling = None
        for one in self.all:
            await one.line.stop()

    @property
    def is_ready(self) -> bool:
        """Whether any of them may be asked."""
        return any(not one.is_draining and one.breaker.refused_s() is None for one in self.all)

    def choose(self, affinity: str | None = None, *, but: Replica | None = None) -> Replica:
        """The server for one request; `affinity`: what requests of one conversation have in common.

        `but` has just failed: it is asked again only where no other can be. Raises EngineUnavailable, ServerOverloaded.
        """
        if len(self.all) == 1 and self._may_take(self.all[0]):
            return self.all[0]
        able = [one for one in self.all if not one.is_draining and one.breaker.refused_s() is None]
        free = [one for one in able if not self._is_full(one)]
        if not free:
            raise self._refusal(able)
        others = [one for one in free if one is not but] or free
        idlest = min(others, key=self._business)
        if affinity is None or len(others) == 1:
            return idlest
        # the highest of all hashes: when a server comes or goes, only its own conversations move
        kin = max(others, key=lambda one: hashlib.sha256(f"{affinity} {one.url}".encode()).digest())
        return kin if self._business(kin) <= self._business(idlest) + AFFINITY_SLACK else idlest

    def _may_take(self, one: Replica) -> bool:
        return not one.is_draining and one.breaker.refused_s() is None and not self._is_full(one)

    def load(self, one: Replica) -> Load:
        """What it said of late; nothing where that is too old."""
        if one.loaded_at is None:
            return _UNKNOWN
        kept_s = KEPT_POLLS * max(self._settings.metrics_poll_s, _POLL_TIMEOUT_S)
        is_fresh = self._clock.now() - one.loaded_at <= kept_s
        return one.load if is_fresh else _UNKNOWN

    def _business(self, one: Replica) -> int:
        """Ours, or all that run there where it tells, and those that wait."""
        load = self.load(one)
        return max(one.running, load.running or 0) + (load.waiting or 0)

    def _is_full(self, one: Replica) -> bool:
        load = self.load(one)
        waiting = load.waiting or 0
        is_crammed = load.kv_use is not None and load.kv_use >= self._settings.max_kv_use
        return waiting >= self._settings.max_waiting or (waiting > 0 and (is_crammed or one.is_thrashing))

    def _refusal(self, able: list[Replica]) -> ServeError:
        name = self._settings.name
        if able:
            loads = [self.load(one) for one in able]
            waiting = min(load.waiting or 0 for load in loads)
            kv_use = max(load.kv_use or 0.0 for load in loads)
            text = (
                f"At the upstream {name} {waiting} requests wait and {kv_use:.0%} of the KV cache are in use, limits "
                f"{self._settings.max_waiting} (max_waiting) and {self._settings.max_kv_use:.0%} (max_kv_use)."
            )
            return ServerOverloaded(text, retry_after_s=1.0)
        waits = [wait for one in self.all if not one.is_draining and (wait := one.breaker.refused_s()) is not None]
        wait_s = min(waits, default=1.0)
        why = f"fails and is left alone for {wait_s:.1f} s more" if waits else "is draining"
        return EngineUnavailable(f"The upstream {name} {why}.", retry_after_s=wait_s)

    async def _poll(self) -> None:
        while True:
            await asyncio.gather(*(self._poll_one(one) for one in self.all))
            await asyncio.sleep(self._settings.metrics_poll_s)

    async def _poll_one(self, one: Replica) -> None:
        """A server that doesn't tell is taken as it is known from here."""
        with contextlib.suppress(LineFailed, TimeoutError):
            async with asyncio.timeout(_POLL_TIMEOUT_S):
                answer = await one.line.get(self._profile.metrics_path)
                body = await answer.read_whole(MAX_METRICS_BYTES)
            if answer.status == 200 and body is not None:
                one.note(read_load(body, self._profile.metrics), self._clock.now())
