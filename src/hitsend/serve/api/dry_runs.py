"""Chat requests that are only looked at: `/v1/estimate`, `/v1/routes/explain`, and two below the chat route.

Enters: an authenticated exchange whose body is a chat request's. Leaves: what it would become, what it would need, what
it would cost. Always true: the body is read by the chat request's own rules and rendered by the same template; nothing
runs, and there is no record, no hold and no bill. Next: `../estimate.py`.
"""

from hitsend.core.events import Parsed
from hitsend.core.request import Request
from hitsend.serve.access.rights import check_model
from hitsend.serve.api import chat_request
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange


async def render(exchange: Exchange) -> None:
    """The prompt exactly as the model would get it: text, ids, and where each message lies in them."""
    request, _ = await _read(exchange)
    request = exchange.services.suited(request)
    prompt = await exchange.services.text.prepare(request, wants_text=True)
    await exchange.answer_json(
        {
            "object": "chat.completion.render",
            "model": request.model,
            "prompt": prompt.text,
            "prompt_token_ids": prompt.prompt_token_ids,
            "num_tokens": prompt.num_tokens,
            "num_control_tokens": prompt.num_control_tokens,
            "spans": prompt.spans,
            "template_sha256": prompt.template_sha256,
            "warnings": request.warnings,
        }
    )


async def input_tokens(exchange: Exchange) -> None:
    """How many tokens the prompt would have."""
    request, _ = await _read(exchange)
    count = len(await exchange.services.text.tokenize_chat(exchange.services.suited(request)))
    await exchange.answer_json({"object": "chat.completion.input_tokens", "input_tokens": count})


async def estimate(exchange: Exchange) -> None:
    """The whole admission as a dry run."""
    request, parsed = await _read(exchange)
    await exchange.answer_json(await exchange.services.estimate(request, parsed.limits))


async def explain(exchange: Exchange) -> None:
    """Which engine a route would choose for this chat request, and why."""
    request, _ = await _read(exchange)
    await exchange.answer_json(await exchange.services.explain(request))


async def _read(exchange: Exchange) -> tuple[Request, Parsed]:
    """The body as a chat request. Raises InvalidRequest, ModelNotFound, PermissionDenied."""
    services = exchange.services
    body = await read_json_body(exchange.receive, exchange.headers, services.access)
    served = [model.id for model in services.models()]
    request, parsed = chat_request.parse(
        body,
        services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )
    check_model(exchange.principal, request.model, served)
    return request, parsed
