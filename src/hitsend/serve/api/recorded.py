"""What every route does that answers with a model's work: a flight record around it, and a watched delivery.

Enters: an authenticated exchange. Leaves: an open `Flight`, closed at the end of the block; the answer on the wire.
Always true: the record is opened before the body is read and closed after the last byte, whatever happens between; an
error is recorded once, by whoever sees it first; a caller whose limits have no room for any request is refused before
its body is read. Next: `chat_completions.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from hitsend.core.errors import LimitError, ServeError
from hitsend.core.events import Authenticated, Delivered, Received
from hitsend.core.record import Flight
from hitsend.serve.api import errors
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.stream.deliver import Delivery


@asynccontextmanager
async def recorded(exchange: Exchange) -> AsyncGenerator[Flight]:
    """A flight record for the length of the block; an error in it is recorded and raised as one that can be shown."""
    services = exchange.services
    flight = exchange.flight = services.flights.open(
        exchange.request_id, exchange.principal, exchange.headers.get(b"traceparent", b"").decode("latin-1") or None
    )
    try:
        _note_caller(exchange, flight)
        await services.shed(exchange.principal.levels)
        yield flight
    except ServeError as error:
        if isinstance(error, LimitError) and error.windows is not None:
            flight.windows = error.windows
        flight.fail(error)
        raise
    except Exception as error:
        shown = errors.public(error, exchange.request_id)
        flight.fail(shown)
        raise shown from error
    finally:
        services.flights.close(flight)


async def deliver(
    exchange: Exchange,
    flight: Flight,
    *,
    frames: AsyncGenerator[bytes] | None = None,
    body: Callable[[], Awaitable[bytes]] | None = None,
    error_frame: Callable[[ServeError], bytes] | None = None,
) -> None:
    """Send the answer, as a stream of frames or as one body, and record that it was.

    `error_frame` writes the end of a stream that broke after its first byte; OpenAI's form, if not given.
    """
    services = exchange.services
    keeping = exchange.keeping
    delivery = Delivery(exchange.receive, exchange.send, services.stream, services.clock, flight)
    if frames is not None:
        broken = error_frame or partial(errors.error_frame, request_id=exchange.request_id)
        frames = frames if keeping is None else keeping.frames(frames)
        failed = await delivery.stream(frames, (), lambda error: broken(errors.public(error, exchange.request_id)))
        if failed is not None:
            flight.fail(failed if isinstance(failed, ServeError) else ServeError("internal error"))
    elif body is not None:
        await delivery.whole(body if keeping is None else keeping.body(body), ())
    flight.record(Delivered(at=services.clock.now(), num_bytes=delivery.num_bytes, num_chunks=delivery.num_chunks))


def _note_caller(exchange: Exchange, flight: Flight) -> None:
    """The record's first two events."""
    caller = exchange.principal
    flight.record(Received(method=exchange.method, path=exchange.path, client=exchange.client_host))
    flight.record(
        Authenticated(name=caller.name, key_id=caller.key_id, user=caller.user, app=caller.app, org=caller.org)
    )
