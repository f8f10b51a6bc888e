"""`POST /v1/chat/completions`: one request from its first byte to its last.

Enters: an authenticated exchange. Leaves: the answer on the wire, and a closed flight record. Always true: the record
is opened before the body is read and closed after the last byte, whatever happens between; an error is recorded once,
by whoever sees it first. Next: `chat_response.py`.
"""

from hitsend.core.errors import ServeError
from hitsend.core.events import Authenticated, Delivered, Received
from hitsend.core.record import Flight
from hitsend.core.request import Request
from hitsend.serve.api import chat_request, chat_response
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.errors import error_frame, public
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.stream.deliver import Delivery


async def chat_completions(exchange: Exchange) -> None:
    """Serve one chat request. Raises what has to become an HTTP status."""
    services = exchange.services
    flight = services.flights.open(exchange.request_id, exchange.principal)
    try:
        _note_caller(exchange, flight)
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
        await _answer(exchange, request, flight)
    except ServeError as error:
        flight.fail(error)
        raise
    except Exception as error:
        shown = public(error, exchange.request_id)
        flight.fail(shown)
        raise shown from error
    finally:
        services.flights.close(flight)


async def _answer(exchange: Exchange, request: Request, flight: Flight) -> None:
    services = exchange.services
    delivery = Delivery(exchange.receive, exchange.send, services.stream, services.clock, flight)
    answer = services.pipeline(request, flight)
    if request.stream:
        failed = await delivery.stream(
            chat_response.encode_stream(request, answer),
            (),
            lambda error: error_frame(error, exchange.request_id),
        )
        if failed is not None:
            flight.fail(failed if isinstance(failed, ServeError) else ServeError("internal error"))
    else:
        await delivery.whole(lambda: chat_response.encode_whole(request, answer), ())
    flight.record(Delivered(at=services.clock.now(), num_bytes=delivery.num_bytes, num_chunks=delivery.num_chunks))


def _note_caller(exchange: Exchange, flight: Flight) -> None:
    caller = exchange.principal
    flight.record(Received(method=exchange.method, path=exchange.path, client=exchange.client_host))
    flight.record(
        Authenticated(name=caller.name, key_id=caller.key_id, user=caller.user, app=caller.app, org=caller.org)
    )
