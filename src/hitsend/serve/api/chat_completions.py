"""`POST /v1/chat/completions`: one request from its first byte to its last.

Enters: an authenticated exchange. Leaves: the answer on the wire, and a closed flight record. Always true: the body is
read only inside the record (`recorded.py`), and nothing is sent before the pipeline's first word. Next:
`chat_response.py`.
"""

from hitsend.serve.api import chat_request, chat_response
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.recorded import deliver, recorded


async def chat_completions(exchange: Exchange) -> None:
    """Serve one chat request. Raises what has to become an HTTP status."""
    services = exchange.services
    async with recorded(exchange) as flight:
        body = await read_json_body(exchange.receive, exchange.headers, services.access)
        models = services.models()
        request, parsed = chat_request.parse(
            body,
            services.access,
            request_id=exchange.request_id,
            principal=exchange.principal,
            default_model=models[0].id if len(models) == 1 else None,
        )
        flight.record(parsed)
        answer = services.pipeline(request, flight)
        if request.stream:
            await deliver(exchange, flight, frames=chat_response.encode_stream(request, answer))
        else:
            await deliver(exchange, flight, body=lambda: chat_response.encode_whole(request, answer))
