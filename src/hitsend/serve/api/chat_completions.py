"""`POST /v1/chat/completions`, and what every dialect's answer goes through: one request from first byte to last.

Enters: an authenticated exchange, and how to read its body. Leaves: the answer on the wire, and a closed flight record.
Always true: the body is read only inside the record (`recorded.py`), nothing but pings is sent before the pipeline's
first word, and dialects differ in how they read and write, never in what happens to a request. Next:
`chat_response.py`.
"""

from functools import partial

from hitsend.serve.api import chat_request, chat_response, chat_whole
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.dialect import Functions, Read, Reading
from hitsend.serve.api.errors import error_frame
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.recorded import deliver, recorded


async def chat_completions(exchange: Exchange) -> None:
    """Serve one chat request. Raises what has to become an HTTP status."""
    await serve(exchange, _read)


async def serve(exchange: Exchange, read: Read) -> None:
    """Serve one request in the dialect that `read` reads. Raises what has to become an HTTP status."""
    services = exchange.services
    async with recorded(exchange) as flight:
        body = await read_json_body(exchange.receive, exchange.headers, services.access)
        reading = await read(exchange, body)
        flight.record(reading.parsed)
        encoder = reading.encoder
        answer = services.pipeline(reading.request, flight)
        if reading.request.stream:
            await deliver(exchange, flight, frames=encoder.stream(answer), error_frame=encoder.error_frame)
        else:
            await deliver(exchange, flight, body=lambda: encoder.whole(answer))


async def _read(exchange: Exchange, body: bytes) -> Reading:
    request, parsed = chat_request.parse(
        body,
        exchange.services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )
    stream, whole = partial(chat_response.encode_stream, request), partial(chat_whole.encode_whole, request)
    return Reading(request, parsed, Functions(stream, whole, partial(error_frame, request_id=exchange.request_id)))
