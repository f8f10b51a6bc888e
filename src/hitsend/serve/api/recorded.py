"""What every route does that answers with a model's work: a flight record around it, and a watched delivery.

Enters: an authenticated exchange. Leaves: an open `Flight`, closed at the end of the block; the answer on the wire.
Always true: the record is opened before the body is read and closed after the last byte, whatever happens between; an
error is recorded once, by whoever sees it first; a caller whose limits have no room for any request is refused before
its body is read. Next: `chat_completions.py`.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import TracebackType

from hitsend.core.errors import LimitError, ServeError
from hitsend.core.events import Authenticated, Delivered, Received
from hitsend.core.record import Flight
from hitsend.serve.api import errors
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.stream.deliver import Delivery


class recorded:  # noqa: N801  # it is used as a block, like those of contextlib, at half of their price
    """A flight record for the length of the block; an error in it is recorded and raised as one that can be shown."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aenter__(self) -> Flight:
        """Open it. Raises what tells a caller early that it has no room."""
        exchange, services = self._exchange, self._exchange.services
        traceparent = exchange.headers.get(b"traceparent", b"").decode("latin-1") or None
        flight = exchange.flight = services.flights.open(exchange.request_id, exchange.principal, traceparent)
        try:
            _note_caller(exchange, flight)
            await services.shed(exchange.principal.levels)
        except BaseException as error:
            self._end(flight, error)
            raise
        return flight

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. Raises what may be shown of an error that may not."""
        assert self._exchange.flight is not None
        self._end(self._exchange.flight, error)

    def _end(self, flight: Flight, error: BaseException | None) -> None:
        try:
            if isinstance(error, ServeError):
                if isinstance(error, LimitError) and error.windows is not None:
                    flight.windows = error.windows
                flight.fail(error)
            elif isinstance(error, Exception):
                shown = errors.public(error, self._exchange.request_id)
                flight.fail(shown)
                raise shown from error
        finally:
            self._exchange.services.flights.close(flight)


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
