"""Answers kept for a repeated Idempotency-Key: who came first works, who comes again gets what came of it.

Enters: a caller's scope, its key and the hash of what it asks. Leaves: a `Claim` for the first, the `Kept` answer for
later ones. Always true: the claim is durable before any work starts, so of many gateways on one database one works; a
claim whose process died, or whose lease ran out, is free again; only a whole and good answer is kept, anything else
frees the key; what is kept has an age, a size and a sum of sizes that are bounded. Next: `metrics.py`.
"""

import asyncio
import logging
import secrets
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, or_, select, update

from hitsend.core.clock import Clock
from hitsend.core.errors import IdempotencyConflict, IdempotencyMismatch, StorageFailed
from hitsend.serve.database.schema import IDEMPOTENCY
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage import owner as owners
from hitsend.settings import UsageSettings

logger = logging.getLogger(__name__)

TEND_S = 1.0
PRUNE_S = 60.0
PRUNE_ROWS = 1000
"""Keys deleted per transaction: a clean-up never holds up a settlement for long."""
RETRY_AFTER_S = 1.0


class Asked(msgspec.Struct, frozen=True):
    """A request with a key. `body_hash`: of its route and its body's bytes."""

    scope: str
    key: str
    body_hash: str
    request_id: str


class Claim(msgspec.Struct, frozen=True):
    """The right to do the work for a key."""

    asked: Asked
    claim_id: str


class Kept(msgspec.Struct, frozen=True):
    """An answer that was given before, by the request of that id."""

    request_id: str
    status: int
    content_type: str
    body: bytes


class IdempotencyStore:
    """The table of keys, the claims of this process, and their leases."""

    def __init__(self, writer: Writer, clock: Clock, settings: UsageSettings, owner: str) -> None:
        self._writer = writer
        self._clock = clock
        self._settings = settings
        self._owner = owner
        self._running: set[str] = set()
        self._keeping: set[asyncio.Task[None]] = set()
        self._kept_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._tended_at = clock.now()
        self._pruned_at: float | None = None

    @property
    def max_answer_bytes(self) -> int:
        """The largest answer that is kept."""
        return self._settings.idempotency_answer_bytes

    def start(self) -> None:
        """Keep leases and delete what is too old, in the background. The writer must run."""
        self._task = asyncio.create_task(self._tend_forever(), name="idempotency keys")

    async def stop(self) -> None:
        """End the background task, and keep what was to be kept. Call before the writer stops. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._keeping:
            await asyncio.wait(self._keeping)

    async def claim(self, asked: Asked) -> Claim | Kept:
        """The right to work, or the answer. Raises IdempotencyConflict, IdempotencyMismatch, StorageFailed."""
        now = self._clock.wall()
        claim = Claim(asked, secrets.token_hex(16))
        row = {
            "scope": asked.scope,
            "idempotency_key": asked.key,
            "claim_id": claim.claim_id,
            "body_hash": asked.body_hash,
            "request_id": asked.request_id,
            "owner": self._owner,
            "lease_until": now + self._settings.hold_lease_s,
            "created_at": now,
            "num_bytes": 0,
        }
        self._running.add(claim.claim_id)
        writing = self._writer.submit(partial(_claim, row=row, oldest=now - self._settings.idempotency_s))
        try:
            standing = await asyncio.shield(writing)
        except (asyncio.CancelledError, StorageFailed):
            self.release(claim)  # it may or may not stand in the database
            raise
        if standing is None:
            return claim
        self._running.discard(claim.claim_id)
        return await self._answer(standing, asked)

    def keep(self, claim: Claim, answer: Kept | None) -> asyncio.Task[None]:
        """Keep the answer, or (None) remember that it was too large. Done when durable; goes on if nobody waits."""
        task = asyncio.create_task(self._keep(claim, answer), name="keep an answer")
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)
        return task

    async def _keep(self, claim: Claim, answer: Kept | None) -> None:
        body = None if answer is None else await asyncio.to_thread(zlib.compress, answer.body, 1)
        if body is not None and self._kept_bytes + len(body) > self._settings.idempotency_total_bytes:
            body = None
        size = len(body) if body is not None else 0
        self._kept_bytes += size
        values: dict[str, Any] = {"status": answer.status if answer else 200, "num_bytes": size, "body": body}
        values["content_type"] = answer.content_type if answer else None
        self._running.discard(claim.claim_id)
        try:
            await self._writer.submit(partial(_keep, claim=claim, values=values))
        except StorageFailed:
            logger.warning("request %s: its answer could not be kept for its key", claim.asked.request_id)

    def release(self, claim: Claim) -> "asyncio.Future[None]":
        """Free the key now, without waiting: the next request with it works again."""
        self._running.discard(claim.claim_id)
        return self._writer.submit(partial(_release, claim=claim))

    async def tend(self) -> None:
        """One round of the background work. Raises StorageFailed."""
        now = self._clock.now()
        if now - self._tended_at >= self._settings.hold_lease_s / 3:
            self._tended_at = now
            until = self._clock.wall() + self._settings.hold_lease_s
            await self._writer.submit(partial(_renew, owner=self._owner, claim_ids=sorted(self._running), until=until))
        if self._pruned_at is None or now - self._pruned_at >= PRUNE_S:
            self._pruned_at = now
            wall = self._clock.wall()
            while await self._writer.submit(partial(_prune, oldest=wall - self._settings.idempotency_s, now=wall)):
                pass
            self._kept_bytes = await self._writer.submit(_sum_of_bytes)

    async def _tend_forever(self) -> None:
        while True:
            try:
                await self.tend()
            except StorageFailed:
                logger.warning("idempotency keys can't be tended now: will try again")
            await asyncio.sleep(TEND_S)

    async def _answer(self, standing: Mapping[str, Any], asked: Asked) -> Kept:
        if standing["body_hash"] != asked.body_hash:
            raise IdempotencyMismatch(
                "this idempotency-key was used with another request (route or body)", param="idempotency-key"
            )
        request_id = standing["request_id"]
        if standing["status"] is None:
            raise IdempotencyConflict(
                f"the first request with this idempotency-key is still running, as {request_id}",
                param="idempotency-key",
                retry_after_s=RETRY_AFTER_S,
            )
        if standing["body"] is None:
            raise IdempotencyConflict(
                f"this idempotency-key was served and billed once, as {request_id}, but its answer was too large to "
                "keep (limits usage.idempotency_answer_bytes, usage.idempotency_total_bytes): ask with another key",
                param="idempotency-key",
            )
        body = await asyncio.to_thread(zlib.decompress, standing["body"])
        return Kept(request_id, standing["status"], standing["content_type"], body)


def _is_of(scope: str, key: str) -> ColumnElement[bool]:
    return and_(IDEMPOTENCY.c.scope == scope, IDEMPOTENCY.c.idempotency_key == key)


def _claim(connection: Connection, row: dict[str, Any], oldest: float) -> Mapping[str, Any] | None:
    """None when the key is this claim's now, else what stands there. Two gateways at once: the database lets one in,
    and the other's second try finds its row.
    """
    is_this = _is_of(row["scope"], row["idempotency_key"])
    found = connection.execute(select(IDEMPOTENCY).where(is_this)).mappings().first()
    standing = None if found is None else dict(found)
    if standing is not None and standing["claim_id"] == row["claim_id"]:
        return None
    if standing is not None:
        if not _is_free(standing, row["created_at"], oldest):
            return standing
        connection.execute(delete(IDEMPOTENCY).where(is_this, IDEMPOTENCY.c.claim_id == standing["claim_id"]))
    connection.execute(insert(IDEMPOTENCY), row)
    return None


def _is_free(standing: Mapping[str, Any], now: float, oldest: float) -> bool:
    if standing["status"] is not None:
        return bool(standing["created_at"] < oldest)
    is_dead = owners.is_dead(standing["owner"])
    return bool(is_dead or (is_dead is None and standing["lease_until"] <= now))


def _is_claimed(claim: Claim) -> ColumnElement[bool]:
    return and_(_is_of(claim.asked.scope, claim.asked.key), IDEMPOTENCY.c.claim_id == claim.claim_id)


def _keep(connection: Connection, claim: Claim, values: dict[str, Any]) -> None:
    connection.execute(update(IDEMPOTENCY).where(_is_claimed(claim)).values(**values))


def _release(connection: Connection, claim: Claim) -> None:
    connection.execute(delete(IDEMPOTENCY).where(_is_claimed(claim), IDEMPOTENCY.c.status.is_(None)))


def _renew(connection: Connection, owner: str, claim_ids: list[str], until: float) -> None:
    for start in range(0, len(claim_ids), PRUNE_ROWS):
        some = claim_ids[start : start + PRUNE_ROWS]
        mine = and_(IDEMPOTENCY.c.owner == owner, IDEMPOTENCY.c.status.is_(None), IDEMPOTENCY.c.claim_id.in_(some))
        connection.execute(update(IDEMPOTENCY).where(mine).values(lease_until=until))


def _prune(connection: Connection, oldest: float, now: float) -> int:
    """One small step; 0 when nothing is left to delete."""
    created_at = IDEMPOTENCY.c.created_at
    is_over = and_(created_at < oldest, or_(IDEMPOTENCY.c.status.is_not(None), IDEMPOTENCY.c.lease_until <= now))
    step = select(created_at).where(is_over).order_by(created_at).limit(1).offset(PRUNE_ROWS - 1)
    last = connection.execute(step).scalar()
    some = is_over if last is None else and_(is_over, created_at <= last)
    return connection.execute(delete(IDEMPOTENCY).where(some)).rowcount


def _sum_of_bytes(connection: Connection) -> int:
    return int(connection.execute(select(func.coalesce(func.sum(IDEMPOTENCY.c.num_bytes), 0))).scalar_one())
