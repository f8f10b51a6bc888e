"""Rows of keys and principals, read and written; and the number by which servers notice that they changed.

Enters: connections and rows. Leaves: `StoredKey`s and `Principal` rows as structs. Always true: whatever changes what
callers may do counts `access_changes` up in the same transaction, so a reader that saw the number sees the change; a
database that fails is StorageFailed here, whoever asked. Next: `store.py`.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Connection, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from hitsend.core.errors import StorageFailed
from hitsend.core.limits import LevelKind, Limits
from hitsend.core.request import Role
from hitsend.serve.access.keys import StoredKey
from hitsend.serve.access.terms import Terms
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import ACCESS_CHANGES, KEYS

Path = tuple[str, ...]
T = TypeVar("T")


class StoredPrincipal(msgspec.Struct, frozen=True):
    """A level with terms of its own. `path` as in `Level`; instants are seconds since the epoch."""

    kind: LevelKind
    path: Path
    terms: Terms
    created_at: float
    disabled_at: float | None = None


@asynccontextmanager
async def reading(database: Database) -> AsyncGenerator[AsyncConnection]:
    """A transaction that reads. Raises StorageFailed."""
    try:
        async with database.reading() as connection:
            yield connection
    except SQLAlchemyError as error:
        raise StorageFailed("keys and principals can't be read now", retry_after_s=1.0) from error


async def read(database: Database, work: Callable[[Connection], T]) -> T:
    """What is found in a transaction that reads, and is asked for often. Raises StorageFailed."""
    try:
        return await database.read(work)
    except SQLAlchemyError as error:
        raise StorageFailed("keys and principals can't be read now", retry_after_s=1.0) from error


async def changing(database: Database, work: Callable[[Connection], T]) -> T:
    """Run a transaction that changes what callers may do: running servers read again. Raises StorageFailed."""

    def change(connection: Connection) -> T:
        # first: two that change at once wait for each other here, and neither works on what the other replaces
        connection.execute(update(ACCESS_CHANGES).values(version=ACCESS_CHANGES.c.version + 1))
        return work(connection)

    try:
        return await database.write(change)
    except SQLAlchemyError as error:
        raise StorageFailed("the database did not take the change", retry_after_s=1.0) from error


def version(connection: Connection) -> int:
    """How often what callers may do was changed."""
    return int(connection.execute(select(ACCESS_CHANGES.c.version)).scalar_one())


def key_of(row: Mapping[Any, Any]) -> StoredKey:
    """A row of `keys`. Raises StorageFailed for one that isn't ours."""
    try:
        return StoredKey(
            key_id=row["key_id"],
            salt=row["salt"],
            digest=row["digest"],
            name=row["key_name"],
            user=row["user_name"],
            app=row["app_name"],
            org=row["org_name"],
            created_at=row["created_at"],
            revoked_at=row["revoked_at"],
            role=msgspec.convert(row["role"], Role),
            terms=terms_of(row),
            endpoints=_names(row["endpoints"]),
            expires_at=row["expires_at"],
            previous_digest=row["previous_digest"],
            overlap_until=row["overlap_until"],
            rotated_at=row["rotated_at"],
            last_used_at=row["last_used_at"],
        )
    except msgspec.MsgspecError as error:
        raise StorageFailed(f"the stored key {row['key_id']} can't be read") from error


def terms_of(row: Mapping[Any, Any]) -> Terms:
    """The terms in a row of `keys` or `principals`."""
    limits = msgspec.json.decode(row["limits"], type=Limits)
    return Terms(limits, _names(row["models"]), row["tier"], row["max_tier"])


def terms_values(terms: Terms) -> dict[str, object]:
    """The columns of terms."""
    return {
        "limits": msgspec.json.encode(terms.limits).decode(),
        "models": names_value(terms.models),
        "tier": terms.tier,
        "max_tier": terms.max_tier,
    }


def names_value(names: tuple[str, ...] | None) -> str | None:
    """A list of names as its column."""
    return None if names is None else msgspec.json.encode(names).decode()


def key_row(connection: Connection, key_id: str) -> StoredKey | None:
    """One key."""
    found = connection.execute(select(KEYS).where(KEYS.c.key_id == key_id)).mappings().first()
    return None if found is None else key_of(found)


def _names(written: str | None) -> tuple[str, ...] | None:
    return None if written is None else msgspec.json.decode(written, type=tuple[str, ...])
