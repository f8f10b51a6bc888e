"""`/inspect/live`: what runs and waits right now, as server-sent events.

Enters: a GET. Leaves: one frame four times a second for as long as somebody looks. Always true: nothing is computed
while nobody does; the watcher's leaving, the end of its key and the server's stopping end it; a caller sees its own
requests, who sees all sees everybody's, with `--workers` those of all processes; no text of a request is in it. Next:
`exchange.py`.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec

from hitsend.core.errors import InvalidApiKey, ServerOverloaded
from hitsend.core.lifecycle import State
from hitsend.core.record import Flight
from hitsend.core.seen import Seen, seen
from hitsend.serve.api import errors
from hitsend.serve.api.credentials import presented_key
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.inspect_search import own_key
from hitsend.serve.api.policy import check_rights, sees_all
from hitsend.serve.api.query import number, query
from hitsend.serve.stream.deliver import Delivery
from hitsend.serve.stream.sse import frame

INTERVAL_S = 0.25
STATE_EVERY = 4
"""The server's own figures are asked for in every fourth frame: with several gateways that is a question to all."""

MAX_WATCHERS = 32
MAX_OF_ONE = 8
"""Of one key: whoever opens many leaves others room."""
MAX_SHOWN = 200
"""Requests in one frame, the oldest first; how many there are is told apart."""

MAX_FRAMES = 1_000_000
_watching: dict[Exchange, str | None] = {}


async def live(exchange: Exchange) -> None:
    """What runs and waits, four times a second; `frames`: end after so many. Raises ServerOverloaded."""
    frames = number(query(exchange, "frames"), "frames", 1, MAX_FRAMES)
    principal = exchange.principal
    num_own = sum(key_id == principal.key_id for key_id in _watching.values())
    if not principal.is_anonymous and num_own >= MAX_OF_ONE:
        raise ServerOverloaded(f"this key watches {MAX_OF_ONE} times already", retry_after_s=5.0)
    if len(_watching) >= MAX_WATCHERS:
        raise ServerOverloaded(f"{MAX_WATCHERS} are watching already", retry_after_s=5.0)
    _watching[exchange] = principal.key_id
    try:
        services = exchange.services
        delivery = Delivery(exchange.receive, exchange.send, services.stream, services.clock)
        broken = partial(errors.error_frame, request_id=exchange.request_id)
        await delivery.stream(
            _frames(exchange, frames), (), lambda error: broken(errors.public(error, exchange.request_id))
        )
    finally:
        del _watching[exchange]


async def _frames(exchange: Exchange, frames: int | None) -> AsyncGenerator[bytes]:
    services = exchange.services
    meter = _Meter(services.clock.now())
    state: dict[str, Any] | None = None
    sent = 0
    while not services.stopping.is_set():
        if sees_all(exchange.principal) and sent % STATE_EVERY == 0:
            await services.gather("state")
            state = services.state()
        whose = own_key(exchange)
        others = await services.seen_elsewhere(whose)
        flights = services.records.under_way(whose)
        yield frame(msgspec.json.encode(_picture(flights, others, state, meter, services.clock.now())))
        sent += 1
        if sent == frames:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S):
                await services.stopping.wait()
        _check_caller(exchange)


def _check_caller(exchange: Exchange) -> None:
    """Raises InvalidApiKey, PermissionDenied once the caller isn't who it was when it began to watch."""
    key, _ = presented_key(exchange)
    now = exchange.services.auth.authenticate(key, exchange.client_host)
    check_rights(now, exchange.route)
    if (now.key_id, now.role) != (exchange.principal.key_id, exchange.principal.role):
        raise InvalidApiKey("this key may see something else by now: watch again")


class _Meter:
    """Tokens a second between two looks. It keeps this process's requests of the last look, so that what one computed
    after it and before its end is counted too; one that came and went between two looks isn't."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._flights: dict[str, Flight] = {}
        self._before: dict[str, tuple[int, int]] = {}

    def read(self, flights: tuple[Flight, ...], others: tuple[Seen, ...], now: float) -> tuple[float, float]:
        """Prompt and output tokens per second since the last time."""
        own = {flight.request_id: flight for flight in flights}
        counts = {each.request_id: (each.prefilled_tokens, each.output_tokens) for each in others}
        counts |= {name: (flight.num_prefilled, flight.num_decoded) for name, flight in (self._flights | own).items()}
        prompt = output = 0
        for name, (prefilled, decoded) in counts.items():
            before = self._before.get(name, (0, 0))
            prompt += prefilled - before[0]
            output += decoded - before[1]
        elapsed_s, self._at = now - self._at, now
        self._flights, self._before = own, counts
        return (prompt / elapsed_s, output / elapsed_s) if elapsed_s > 0 else (0.0, 0.0)


def _picture(
    flights: tuple[Flight, ...], others: tuple[Seen, ...], state: dict[str, Any] | None, meter: _Meter, now: float
) -> dict[str, Any]:
    prompt, output = meter.read(flights, others, now)
    every = sorted((*map(seen, flights), *others), key=lambda each: each.received_at)
    return {
        "pid": os.getpid(),
        "num_requests": len(every),
        "num_waiting": sum(each.state in _WAITING for each in every),
        "prompt_tokens_per_s": round(prompt, 2),
        "output_tokens_per_s": round(output, 2),
        "step": _step(every),
        "requests": [_shown(each, now) for each in every[:MAX_SHOWN]],
        "state": state,
    }


_WAITING = (str(State.WAITING), str(State.PREEMPTED))


def _shown(one: Seen, now: float) -> dict[str, Any]:
    first = one.first_token_at
    return {
        "request_id": one.request_id,
        "name": one.name,
        "model": one.model,
        "state": one.state,
        "age_ms": round((now - one.received_at) * 1000.0, 1),
        "ttft_ms": None if first is None else round((first - one.received_at) * 1000.0, 1),
        "prompt_tokens": one.prompt_tokens,
        "prefilled_tokens": one.prefilled_tokens,
        "output_tokens": one.output_tokens,
        "max_tokens": one.max_tokens,
        "step": None if one.step is None else one.step.step,
    }


def _step(every: list[Seen]) -> dict[str, Any] | None:
    """The newest step that one of these took part in, and who else of them did."""
    taken = [(each, each.step) for each in every if each.step is not None]
    if not taken:
        return None
    first, newest = max(taken, key=lambda pair: pair[1].ended_at)
    same = [(each, step) for each, step in taken if (each.engine, step.step) == (first.engine, newest.step)]
    return {
        "step": newest.step,
        "engine": first.engine,
        "ms": round((newest.ended_at - newest.started_at) * 1000.0, 3),
        "batch_prefill_tokens": newest.batch_prefill_tokens,
        "batch_decode_tokens": newest.batch_decode_tokens,
        "batch_sequences": newest.batch_sequences,
        "members": [
            {"request_id": each.request_id, "prefill_tokens": step.prefill_tokens, "decode_tokens": step.decode_tokens}
            for each, step in same
        ],
    }
