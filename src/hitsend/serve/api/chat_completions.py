"""`POST /v1/chat/completions`, and what every dialect's answer goes through: one request from first byte to last.

Enters: an authenticated exchange, and how to read its body. Leaves: the answer on the wire, and a closed flight record.
Always true: the record is opened before the body is read and closed after the last byte, whatever happens between; an
error is recorded once, by whoever sees it first; dialects differ in how they read and write, never in what happens to a
request. Next: `chat_response.py`.
"""

from functools import partial

from hitsend.core.errors import ServeError
from hitsend.core.events import Delivered
from hitsend.core.record import Flight
from hitsend.serve.api import chat_request, chat_response
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.dialect import Functions, Read, Reading
from hitsend.serve.api.errors import error_frame, public
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.stream.deliver import Delivery


async def chat_completions(exchange: Exchange) -> None:
    """Serve one chat request. Raises what has to become an HTTP status."""
    await serve(exchange, _read)


async def serve(exchange: Exchange, read: Read) -> None:
    """Serve one request in the dialect that `read` reads. Raises what has to become an HTTP status."""
    services = exchange.services
    flight = services.flights.open(exchange.request_id, exchange.principal)
    try:
        exchange.note_caller(flight)
        body = await read_json_body(exchange.receive, exchange.headers, services.access)
        reading = await read(exchange, body)
        flight.record(reading.parsed)
        await _answer(exchange, reading, flight)
    except ServeError as error:
        flight.fail(error)
        raise
    except Exception as error:
        shown = public(error, exchange.request_id)
        flight.fail(shown)
        raise shown from error
    finally:
        services.flights.close(flight)


async def _answer(exchange: Exchange, reading: Reading, flight: Flight) -> None:
    services, request, encoder = exchange.services, reading.request, reading.encoder
    delivery = Delivery(exchange.receive, exchange.send, services.stream, services.clock, flight)
    answer = services.pipeline(request, flight)
    if request.stream:
        failed = await delivery.stream(
            encoder.stream(answer), (), lambda error: encoder.error_frame(public(error, exchange.request_id))
        )
        if failed is not None:
            flight.fail(failed if isinstance(failed, ServeError) else ServeError("internal error"))
    else:
        await delivery.whole(lambda: encoder.whole(answer), ())
    flight.record(Delivered(at=services.clock.now(), num_bytes=delivery.num_bytes, num_chunks=delivery.num_chunks))


async def _read(exchange: Exchange, body: bytes) -> Reading:
    request, parsed = chat_request.parse(
        body,
        exchange.services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model=exchange.default_model,
    )
    stream, whole = partial(chat_response.encode_stream, request), partial(chat_response.encode_whole, request)
    return Reading(request, parsed, Functions(stream, whole, partial(error_frame, request_id=exchange.request_id)))
