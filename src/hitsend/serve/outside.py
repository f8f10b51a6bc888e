"""How it is with upstreams and routes at this moment, for the metrics.

Enters: engines, routes' figures, the ledger. Leaves: an `Elsewhere`. Always true: nothing here waits but reading the
day's neurons, which happens before a scrape; where that can't be read, what was known of the same day stands. Next:
`watch.py`.
"""

from collections.abc import Iterable

from hitsend.core.clock import Clock
from hitsend.core.errors import StorageFailed
from hitsend.serve.database.connection import Database
from hitsend.serve.engine.breaker import BreakerState
from hitsend.serve.engine.openai import FREE_NEURONS, OpenAIEngine
from hitsend.serve.engine.protocol import Engine
from hitsend.serve.engine.replicas import Replica
from hitsend.serve.engine.targets import Targets
from hitsend.serve.usage.elsewhere import Elsewhere, RouteNow, ServerNow, UpstreamNow
from hitsend.serve.usage.report import read_ledger
from hitsend.serve.usage.rows import day_neurons, day_of
from hitsend.settings_upstreams import WorkersAISettings

_STATES: tuple[BreakerState, ...] = ("closed", "half_open", "open")


class Outside:
    """Reads it. `engines` may have the same one several times."""

    def __init__(self, engines: Iterable[Engine], targets: Targets, database: Database, clock: Clock) -> None:
        self._engines = {one.name: one for one in engines if isinstance(one, OpenAIEngine)}
        self._targets = targets
        self._database = database
        self._clock = clock
        self._has_neurons = any(isinstance(one.settings, WorkersAISettings) for one in self._engines.values())
        self._today: tuple[str, int] | None = None

    async def look(self) -> None:
        """Find out what the day has used of Workers AI's neurons, if anybody is asked there."""
        if not self._has_neurons:
            return
        day = day_of(self._clock.wall())
        try:
            async with read_ledger(self._database) as connection:
                found = await connection.run_sync(day_neurons, day)
        except StorageFailed:
            return
        self._today = (day, found.used_micro + found.held_micro)

    def now(self) -> Elsewhere:
        """Everything, as it was last found."""
        is_known = self._today is not None and self._today[0] == day_of(self._clock.wall())
        neurons = (self._today[1], FREE_NEURONS * 1_000_000) if self._today is not None and is_known else None
        upstreams = tuple(self._upstream(one) for one in self._engines.values())
        return Elsewhere(upstreams, tuple(map(self._route, self._targets.routes)), neurons)

    def _upstream(self, engine: OpenAIEngine) -> UpstreamNow:
        servers = tuple(self._server(engine, number, one) for number, one in enumerate(engine.replicas.all))
        return UpstreamNow(engine.name, engine.state().running, engine.retries.left, servers)

    def _server(self, engine: OpenAIEngine, number: int, one: Replica) -> ServerNow:
        load, age_s = engine.replicas.load(one), None
        if one.loaded_at is not None:
            age_s = self._clock.now() - one.loaded_at
        told = (load.running, load.waiting, load.kv_use, load.preemptions)
        return ServerNow(number, _STATES.index(one.breaker.state), one.breaker.num_openings, age_s, *told)

    def _route(self, name: str) -> RouteNow:
        route, shadow = self._targets.routes[name], self._targets.shadows[name]
        is_rolled_back = name in self._targets.rolled_back
        share = None if route.strategy != "canary" else 0.0 if is_rolled_back else route.canary.share
        different = shadow.num_compared - shadow.num_same
        copies = {"same": shadow.num_same, "different": different}
        copies |= {"failed": shadow.num_failed, "skipped": shadow.num_skipped}
        return RouteNow(name, share, is_rolled_back, copies if route.shadow is not None else {})
