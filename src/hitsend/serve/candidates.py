"""What is known of a request and of a route's engines when one has to be chosen.

Enters: a request to a route, and the stages. Leaves: facts for `engine/router.py`. Always true: looking reserves
nothing and asks no engine; a prompt's tokens are estimated from its bytes, the exact count is made for the engine that
is asked; a price is the one in force now. Next: `routed.py`.
"""

import msgspec

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest, LimitError, ServeError
from hitsend.core.limits import RateWindows
from hitsend.core.request import Request
from hitsend.serve.access.quota import Ask
from hitsend.serve.chat.handover import BYTES_PER_TOKEN, check, count
from hitsend.serve.engine.openai_body import asked
from hitsend.serve.engine.router import RequestFacts, TargetFacts
from hitsend.serve.engine.targets import Targets
from hitsend.serve.pipeline import longest_answer
from hitsend.serve.stages import Stages
from hitsend.settings import RouteSettings

USUAL_OUTPUT = 512
"""Tokens that an answer is taken to have where the client set no limit."""
BUDGETS = ("usd_per_day", "usd_per_month")
_QUIET = (None, "none", "minimal")


async def facts_of(request: Request, route: RouteSettings, stages: Stages) -> RequestFacts:
    """Of the request."""
    left = await budget_left(request, stages) if route.strategy == "budget" else None
    return RequestFacts(
        request_id=request.request_id,
        prompt_tokens=estimated_tokens(request),
        output_tokens=(request.max_tokens or USUAL_OUTPUT) * request.n,
        wants_thinking=wants_thinking(request, route),
        budget_left=left,
    )


def estimated_tokens(request: Request) -> int:
    """Of the prompt, all prompts together."""
    if not request.prompts:
        return count(request, None).estimated
    sizes = (
        len(one) if isinstance(one, tuple) else -(-len(one.encode()) // BYTES_PER_TOKEN) for one in request.prompts
    )
    return sum(sizes)


def wants_thinking(request: Request, route: RouteSettings) -> bool:
    """Whether the client asked for thoughts, unless the route has decided that."""
    if route.thinking != "leave":
        return route.thinking == "on"
    asked = request.template_kwargs.get("enable_thinking")
    if asked is not None:
        return bool(asked)
    return request.reasoning_effort not in _QUIET or bool(request.thinking_token_budget)


async def budget_left(request: Request, stages: Stages) -> float | None:
    """The share that is left of the tightest budget above the caller; None: there is none."""
    levels = request.principal.levels
    if not levels:
        return None
    try:
        windows = await stages.quota.preview(Ask(request.request_id, levels, 0, 0, 0))
    except LimitError as error:
        windows = error.windows or RateWindows()
    budgets = [one for one in windows.checks if one.name in BUDGETS]
    return min((max(0.0, 1 - one.value / one.limit) if one.limit else 0.0 for one in budgets), default=None)


def targets_of(
    request: Request, route: RouteSettings, stages: Stages, targets: Targets
) -> tuple[dict[str, TargetFacts], dict[str, ServeError]]:
    """Each engine of the route as it stands, and for those that can't serve this request the error that says so."""
    found: dict[str, TargetFacts] = {}
    errors: dict[str, ServeError] = {}
    for name in route.engines:
        model = targets.models[route.model][name]
        engine = stages.engines[model]
        price = stages.prices.find(model, is_local=engine.is_local)
        unable = refusal(able_request(request, route, model, stages), stages) if route.unsupported == "next" else None
        if unable is not None:
            errors[name] = unable
        found[name] = TargetFacts(
            name=name,
            model=model,
            engine=engine.name,
            is_ready=engine.state().is_ready,
            unable=None if unable is None else unable.message,
            input_picousd=price.input_picousd,
            output_picousd=price.output_picousd,
            observed=targets.observed(route.model, name),
        )
    return found, errors


def refusal(request: Request, stages: Stages) -> InvalidRequest | ContextLengthExceeded | None:
    """Why the engine of its model can't serve it, or the caller's limits can never hold it there, as far as that is
    known without counting tokens."""
    terms = stages.handovers.get(request.model)
    context = stages.engines[request.model].facts.cells_per_slot
    try:
        if terms is not None:
            check(request, terms, set(asked(request)))
    except InvalidRequest as error:
        return error
    least = (request.max_tokens or 1) + estimated_tokens(request) // 2
    if least >= context:
        text = f"about {estimated_tokens(request)} tokens and {request.max_tokens or 1} of output, context {context}"
        return ContextLengthExceeded(text, param="messages")
    try:
        longest_answer(request, stages, least_held(request, stages))
    except InvalidRequest as error:
        return error
    return None


def least_held(request: Request, stages: Stages) -> int:
    """Tokens that a hold has for the prompt at least, at the engine of its model: where a tokenizer will be asked, half
    of what its bytes make likely."""
    terms = stages.handovers.get(request.model)
    is_by_bytes = terms is not None and terms.counter is None and not terms.is_counted
    return count(request, None).reserved if is_by_bytes else estimated_tokens(request) // 2


def able_request(request: Request, route: RouteSettings, model: str, stages: Stages) -> Request:
    """The request as that model gets it: its name, and the route's will about thoughts where the model can be told."""
    changed = msgspec.structs.replace(request, model=model, route=route.model)
    if route.thinking == "leave":
        return changed
    if route.thinking == "off" or request.reasoning_effort in _QUIET:  # what says otherwise goes nowhere
        changed = msgspec.structs.replace(changed, reasoning_effort=None)
    if route.thinking == "off" or not request.thinking_token_budget:
        changed = msgspec.structs.replace(changed, thinking_token_budget=None)
    terms = stages.handovers.get(model)
    if terms is not None and "chat_template_kwargs" not in terms.takes:
        text = f"thinking: {route.model} wants it {route.thinking}, which {terms.engine} can't be told"
        return msgspec.structs.replace(changed, warnings=(*changed.warnings, text))
    kwargs = changed.template_kwargs | {"enable_thinking": route.thinking == "on"}
    return msgspec.structs.replace(changed, template_kwargs=kwargs)
