"""Keys in the database: create, list, change, rotate, revoke; and all that a server has to know to tell callers apart.

Enters: names and terms. Leaves: keys. Always true: nothing is ever deleted (a revoked key stays, so that revoking the
last one does not open the server to anonymous callers); names are short and printable, they end up in logs, rows and
terminals; a secret leaves once, when it is made. Next: `principals.py`.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import Connection, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest, NotFound, StorageFailed
from hitsend.core.request import Role
from hitsend.serve.access.keys import KeyInfo, NewKey, StoredKey, digest, info, make_key, make_salt
from hitsend.serve.access.principals import principal_of
from hitsend.serve.access.rows import (
    StoredPrincipal,
    changing,
    key_of,
    key_row,
    names_value,
    read,
    reading,
    terms_values,
    version,
)
from hitsend.serve.access.terms import TermsChange, changed, check_name, check_place, instant, seconds
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import KEYS, PRINCIPALS

MAX_ENDPOINTS = 64
_ENDPOINT = re.compile(r"(?:/[A-Za-z0-9._{}-]+)+", re.ASCII)
_OVERLAP_MAX_S = 366 * 86_400.0


class KeyOwner(msgspec.Struct, frozen=True):
    """Whom a key speaks for: a name for people, and the levels above it."""

    name: str
    user: str | None = None
    app: str | None = None
    org: str | None = None


class KeyChange(TermsChange, frozen=True, forbid_unknown_fields=True):
    """What a key gets or may be changed in; null takes it away, what isn't named stays.

    `endpoints`: routes, or what routes begin with, such as /v1/embeddings. `expires_at`: seconds since the epoch, an
    ISO date or time, or a length of time from now such as 30d.
    """

    role: Role | UnsetType = UNSET
    endpoints: tuple[str, ...] | UnsetType | None = UNSET
    expires_at: str | int | float | UnsetType | None = UNSET
    name: str | UnsetType = UNSET


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that decides who may do what, as it stood at `version`."""

    version: int
    keys: tuple[StoredKey, ...]
    principals: tuple[StoredPrincipal, ...]


class KeyStore:
    """The `keys` table."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self.clock = clock

    async def create(self, owner: KeyOwner, change: KeyChange | None = None) -> NewKey:
        """Make and store a key. Raises InvalidRequest that names the field, StorageFailed."""
        check_name("name", owner.name)
        for field in ("user", "app", "org"):
            check_place(field, getattr(owner, field))
        key_id, key = make_key()
        salt = make_salt()
        now = self.clock.wall()
        plain = StoredKey(key_id, salt, digest(salt, key), owner.name, owner.user, owner.app, owner.org, now)
        made = _changed(plain, change or KeyChange(), now)
        values = _values(made) | {
            "key_id": key_id,
            "salt": salt,
            "digest": made.digest,
            "user_name": owner.user,
            "app_name": owner.app,
            "org_name": owner.org,
            "created_at": now,
        }

        def add(connection: Connection) -> None:
            connection.execute(insert(KEYS).values(values))

        await changing(self._database, add)
        return NewKey(key_id, key, made.name, made.expires_at)

    async def list(self) -> tuple[KeyInfo, ...]:
        """All keys, revoked ones too, oldest first. Raises StorageFailed."""
        return tuple(info(stored) for stored in await self.load())

    async def load(self) -> tuple[StoredKey, ...]:
        """All keys with their digests. Raises StorageFailed."""
        async with reading(self._database) as connection:
            found = (await connection.execute(_ALL_KEYS)).mappings().all()
        return tuple(key_of(row) for row in found)

    async def get(self, key_id: str) -> KeyInfo:
        """One key. Raises NotFound, StorageFailed."""
        async with reading(self._database) as connection:
            stored = await connection.run_sync(key_row, key_id)
        if stored is None:
            raise _no_such_key()
        return info(stored)

    async def change(self, key_id: str, change: KeyChange) -> KeyInfo:
        """Change what it may do, from now on. Raises NotFound, InvalidRequest, StorageFailed."""

        def replace(connection: Connection) -> StoredKey:
            after = _changed(_existing(connection, key_id), change, self.clock.wall())
            connection.execute(update(KEYS).where(KEYS.c.key_id == key_id).values(_values(after)))
            return after

        return info(await changing(self._database, replace))

    async def rotate(self, key_id: str, overlap: str | float, expires_at: str | float | None = None) -> NewKey:
        """Give a key another secret. The one it had is good for `overlap` longer (0: ends now), an older one ends now.

        Its id stays, and with it limits, spending, records and stored responses. Raises NotFound, InvalidRequest for a
        revoked or expired key, StorageFailed.
        """
        lasting = seconds("overlap", overlap) if isinstance(overlap, str) else float(overlap)
        if not 0 <= lasting <= _OVERLAP_MAX_S:
            raise InvalidRequest(f"overlap must be from 0 to 366d, not {overlap!r}", param="overlap")
        now = self.clock.wall()

        def replace(connection: Connection) -> NewKey:
            stored = _existing(connection, key_id)
            if expires_at is not None:
                stored = msgspec.structs.replace(stored, expires_at=instant("expires_at", expires_at, now))
            if stored.revoked_at is not None or (stored.expires_at is not None and stored.expires_at <= now):
                raise InvalidRequest("a revoked or expired key can't be rotated: make another one", param="id")
            _, key = make_key(key_id)
            values = {
                "digest": digest(stored.salt, key),
                "previous_digest": stored.digest if lasting else None,
                "overlap_until": now + lasting if lasting else None,
                "rotated_at": now,
                "expires_at": stored.expires_at,
            }
            connection.execute(update(KEYS).where(KEYS.c.key_id == key_id).values(values))
            return NewKey(key_id, key, stored.name, stored.expires_at)

        return await changing(self._database, replace)

    async def revoke(self, key_id: str) -> KeyInfo:
        """End a key, for good; a second time changes nothing. Raises NotFound, StorageFailed."""
        ended = update(KEYS).where(KEYS.c.key_id == key_id, KEYS.c.revoked_at.is_(None))

        def end(connection: Connection) -> None:
            connection.execute(ended.values(revoked_at=self.clock.wall()))

        await changing(self._database, end)
        return await self.get(key_id)

    async def snapshot(self, known_version: int | None = None) -> Snapshot | None:
        """Everything, or None where nothing has changed since `known_version`. Raises StorageFailed."""
        # the number first: what is read after it is at least as new, and newer things are read once more next time
        current = await read(self._database, version)
        if current == known_version:
            return None
        async with reading(self._database) as connection:
            keys = (await connection.execute(_ALL_KEYS)).mappings().all()
            principals = (await connection.execute(select(PRINCIPALS))).mappings().all()
        return await asyncio.to_thread(_snapshot, current, keys, principals)

    async def touch(self, used: Mapping[str, float]) -> None:
        """Note when keys were last used (id -> seconds since the epoch). Raises StorageFailed."""

        def note(connection: Connection) -> None:
            for key_id, at in sorted(used.items()):
                is_older = or_(KEYS.c.last_used_at.is_(None), KEYS.c.last_used_at < at)
                connection.execute(update(KEYS).where(KEYS.c.key_id == key_id, is_older).values(last_used_at=at))

        try:
            await self._database.write(note)
        except SQLAlchemyError as error:
            raise StorageFailed("the database did not take when keys were used", retry_after_s=1.0) from error


_ALL_KEYS = select(KEYS).order_by(KEYS.c.created_at, KEYS.c.key_id)


def _snapshot(current: int, keys: Any, principals: Any) -> Snapshot:
    try:
        found = tuple(principal_of(dict(row)) for row in principals)
    except msgspec.MsgspecError as error:
        raise StorageFailed("a stored principal can't be read") from error
    return Snapshot(current, tuple(key_of(row) for row in keys), found)


def _changed(stored: StoredKey, change: KeyChange, now: float) -> StoredKey:
    after: dict[str, Any] = {"terms": changed(stored.terms, change)}
    if change.name is not UNSET:
        check_name("name", change.name)
        after["name"] = change.name
    if change.role is not UNSET:
        after["role"] = change.role
    if change.endpoints is not UNSET:
        after["endpoints"] = _checked_endpoints(change.endpoints)
    if change.expires_at is not UNSET:
        after["expires_at"] = None if change.expires_at is None else instant("expires_at", change.expires_at, now)
    return msgspec.structs.replace(stored, **after)


def _checked_endpoints(endpoints: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if endpoints is None:
        return None
    if len(endpoints) > MAX_ENDPOINTS:
        raise InvalidRequest(f"endpoints has {len(endpoints)} entries, limit {MAX_ENDPOINTS}", param="endpoints")
    for index, endpoint in enumerate(endpoints):
        if not _ENDPOINT.fullmatch(endpoint):
            where = f"endpoints[{index}]"
            raise InvalidRequest(f"{where} must be a route such as /v1/embeddings, not {endpoint[:80]!r}", param=where)
    return tuple(dict.fromkeys(endpoints))


def _values(key: StoredKey) -> dict[str, object]:
    """The columns that may change."""
    return terms_values(key.terms) | {
        "key_name": key.name,
        "role": key.role,
        "endpoints": names_value(key.endpoints),
        "expires_at": key.expires_at,
    }


def _existing(connection: Connection, key_id: str) -> StoredKey:
    stored = key_row(connection, key_id)
    if stored is None:
        raise _no_such_key()
    return stored


def _no_such_key() -> NotFound:
    return NotFound("there is no key with that id", param="id")
