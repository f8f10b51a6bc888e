"""What a route would choose for a request if it were sent now, and why.

Enters: a `Request` to any served name. Leaves: an `Explanation`, or for `/v1/estimate` the estimate of the engine that
would be asked first. Always true: it is the same decision as the real one, from the same figures; nothing is asked,
reserved or recorded; a request without an id of the client's own gets another id when it is really sent, and with it
perhaps another share of a weighted or canary route. Next: `estimate.py`.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

from hitsend.core.errors import ServeError
from hitsend.core.events import LimitCheck
from hitsend.core.request import Request
from hitsend.serve.candidates import able_request, least_held, refusal
from hitsend.serve.chat.formats import suited
from hitsend.serve.engine.router import Candidate, RequestFacts
from hitsend.serve.estimate import WHY_THIS_ENGINE, EngineChoice, Estimate, Rates, after_the_hold, estimate
from hitsend.serve.routed import Routing


class Explanation(msgspec.Struct, frozen=True):
    """The answer of `/v1/routes/explain`. `engine` and `target` (a served model) would be asked first, then the rest of
    `order`. `route` is None for a model that is no route. `refused`: why nobody would be asked, where the caller's
    limits can't hold the prompt and the shortest answer there, now or ever, or that engine can't serve it.
    """

    model: str
    route: str | None
    strategy: str | None
    engine: str
    target: str
    reason: str
    order: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    facts: RequestFacts | None = None
    shadow: str | None = None
    refused: str | None = None
    object: Literal["hitsend.route_explanation"] = "hitsend.route_explanation"


@dataclass(frozen=True)
class DryRuns:
    """Both of them, for all served names."""

    routing: Routing
    rates: Rates
    reserve_tokens: int

    async def explain(self, request: Request) -> Explanation:
        """Raises InvalidRequest where no engine of the route can serve it."""
        routing, stages = self.routing, self.routing.stages
        route = routing.targets.routes.get(request.model)
        if route is None:
            engine, refused = stages.engines[request.model], await self._refused(request)
            return Explanation(request.model, None, None, engine.name, request.model, WHY_THIS_ENGINE, refused=refused)
        decision = await routing.decide(request)
        first = next(one for one in decision.candidates if one.name == decision.order[0])
        return Explanation(
            model=request.model,
            route=route.model,
            strategy=route.strategy,
            engine=first.engine,
            target=first.model,
            reason=decision.reason,
            order=decision.order,
            candidates=decision.candidates,
            facts=decision.facts,
            shadow=route.shadow,
            refused=await self._refused(able_request(request, route, first.model, stages)),
        )

    async def _refused(self, request: Request) -> str | None:
        stages = self.routing.stages
        unable = refusal(request, stages)
        if unable is not None:
            return unable.message
        try:
            await after_the_hold(request, stages, least_held(request, stages), request.max_tokens or 1)
        except ServeError as error:
            return error.message
        return None

    async def estimate(self, request: Request, limits: tuple[LimitCheck, ...]) -> Estimate:
        """See `estimate.estimate`."""
        route = self.routing.targets.routes.get(request.model)
        if route is None:
            return await self._estimate(self._suited(request, request.model), limits)
        chosen = await self.explain(request)
        asked = able_request(request, route, chosen.target, self.routing.stages)
        asked = self._suited(asked, chosen.target)
        found = await self._estimate(asked, limits)
        why = f"route {route.model} ({route.strategy}): {chosen.reason}"
        return msgspec.structs.replace(found, model=request.model, engine=EngineChoice(chosen.engine, why))

    def _suited(self, request: Request, model: str) -> Request:
        stages = self.routing.stages.of(model)
        is_elsewhere = model in stages.handovers or model not in stages.engines
        return request if is_elsewhere else suited(request, stages.text.facts, stages.formats)

    async def _estimate(self, request: Request, limits: tuple[LimitCheck, ...]) -> Estimate:
        stages = self.routing.stages.of(request.model)
        return await estimate(request, limits, stages=stages, rates=self.rates, reserve_tokens=self.reserve_tokens)
