"""`POST /v1/messages` and `POST /v1/messages/count_tokens`.

Enters: authenticated exchanges. Leaves: answers in Anthropic's words. Always true: a message goes the same way as a
chat request, is counted, billed and recorded as one; counting runs nothing and costs nothing.
Next: `messages_request.py`.
"""

from hitsend.serve.api import messages_request
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.chat_completions import serve
from hitsend.serve.api.dialect import Reading
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.messages_stream import MessageEncoder


async def create(exchange: Exchange) -> None:
    """Serve one message. Raises what has to become an HTTP status."""
    await serve(exchange, _read)


async def count_tokens(exchange: Exchange) -> None:
    """Answer `{"input_tokens": n}`, exactly what the same message would be billed for."""
    services = exchange.services
    body = await read_json_body(exchange.receive, exchange.headers, services.access)
    request = messages_request.read_counted(
        body,
        services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )
    exchange.check_tokenizer(request.model)
    await exchange.answer_json({"input_tokens": len(await services.text.tokenize_chat(services.suited(request)))})


async def _read(exchange: Exchange, body: bytes) -> Reading:
    request, parsed = messages_request.read(
        body,
        exchange.services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )
    return Reading(request, parsed, MessageEncoder(request))
