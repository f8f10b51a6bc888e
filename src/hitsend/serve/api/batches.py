"""`/v1/batches`: a file of requests, to be worked off within a day.

Enters: authenticated exchanges. Leaves: OpenAI's batch objects. Always true: a batch is in the database before its
creation is answered; what doesn't fit (file, endpoint, window) is refused here, what is wrong inside of the file is
said by the batch; a key sees its own batches, and another's are a 404. Next: `../batching/`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.core.ids import IDS
from hitsend.serve.api import strict_json
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import OF_BATCHES, Exchange
from hitsend.serve.api.files import PURPOSE, batch_services, page
from hitsend.serve.api.policy import check_rights
from hitsend.serve.api.queries import query_of, read_limit
from hitsend.serve.usage.batches import WINDOW_S, Batch, Fault
from hitsend.serve.usage.files import whose

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
WINDOW = "24h"
MAX_LISTED = 100
MAX_LABEL_KEY, MAX_LABEL = 64, 512


class BatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The wire's request."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Annotated[str, Meta(max_length=64)]
    completion_window: Annotated[str, Meta(max_length=16)]
    metadata: dict[str, str] | None = None


async def create(exchange: Exchange) -> None:
    """Begin a batch with a file's lines. Raises what has to become an HTTP status."""
    services, limits = batch_services(exchange), exchange.services.access
    body = await read_json_body(exchange.receive, exchange.headers, limits)
    tree, _ = strict_json.decode(body, limits.max_json_depth)
    wire = strict_json.typed(tree, BatchBody)
    if wire.endpoint not in ENDPOINTS:
        raise InvalidRequest(f"endpoint: {wire.endpoint!r}, expected one of {', '.join(ENDPOINTS)}", param="endpoint")
    if wire.completion_window != WINDOW:
        text = f"completion_window: {wire.completion_window!r}, only {WINDOW!r} is served"
        raise InvalidRequest(text, param="completion_window")
    _check_labels(wire.metadata or {}, limits.max_metadata)
    check_rights(exchange.principal, wire.endpoint)
    try:
        file = await services.files.get(wire.input_file_id, whose(exchange.principal))
    except NotFound as error:
        raise NotFound(error.message, param="input_file_id") from None
    if file.purpose != PURPOSE:
        text = f"input_file_id: the purpose of {file.file_id} is {file.purpose!r}, not {PURPOSE!r}"
        raise InvalidRequest(text, param="input_file_id")
    now = exchange.services.clock.wall()
    batch = Batch(
        batch_id=f"{OF_BATCHES}{IDS.take(12)}",
        key_id=exchange.principal.key_id,
        caller=msgspec.json.encode(msgspec.structs.replace(exchange.principal, levels=())),
        endpoint=wire.endpoint,
        input_file_id=file.file_id,
        status="validating",
        created_at=now,
        expires_at=now + WINDOW_S,
        labels=msgspec.json.encode(wire.metadata).decode(),
    )
    batch = await services.batches.create(batch)
    services.wake()
    await exchange.answer_json(shown(batch))


async def list_batches(exchange: Exchange) -> None:
    """The caller's batches, newest first, a page at a time."""
    query = query_of(exchange, ("limit", "after"))
    limit = read_limit(query, default=20, most=MAX_LISTED)
    batches = batch_services(exchange).batches
    found = await batches.page(whose(exchange.principal), limit=limit + 1, after=query.get("after"))
    await exchange.answer_json(page([shown(batch) for batch in found[:limit]], has_more=len(found) > limit))


async def retrieve(exchange: Exchange) -> None:
    """A batch as it stands."""
    batches = batch_services(exchange).batches
    await exchange.answer_json(shown(await batches.get(exchange.param, whose(exchange.principal))))


async def cancel(exchange: Exchange) -> None:
    """Let no further line of a batch begin."""
    services = batch_services(exchange)
    batch = await services.batches.cancel(exchange.param, whose(exchange.principal))
    services.wake()
    await exchange.answer_json(shown(batch))


def shown(batch: Batch) -> dict[str, Any]:
    """OpenAI's batch object."""
    faults = msgspec.json.decode(batch.faults, type=list[Fault])
    ends = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    instants = {f"{name}_at": _seconds(getattr(batch, f"{name}_at")) for name in ends}
    counts = {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": msgspec.to_builtins(faults)} if faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        **instants,
        "request_counts": counts,
        "metadata": msgspec.json.decode(batch.labels),
    }


def _seconds(instant: float | None) -> int | None:
    return None if instant is None else int(instant)


def _check_labels(labels: dict[str, str], most: int) -> None:
    if len(labels) > most:
        raise InvalidRequest(f"metadata: {len(labels)} keys, limit {most} (access.max_metadata)", param="metadata")
    for name, value in labels.items():
        if len(name) > MAX_LABEL_KEY or len(value) > MAX_LABEL:
            text = f"metadata: a key has at most {MAX_LABEL_KEY} characters, a value {MAX_LABEL}"
            raise InvalidRequest(text, param="metadata")
