"""Organisations, applications, users and the global level in the database: create, list, change, disable.

Enters: names and changes. Leaves: what is stored. Always true: a level without a row has no limits, so a key may name
an organisation that nobody made; nothing is ever deleted, disabling one refuses every key beneath it; the same bot in
two organisations is two applications. Next: `rights.py`.
"""

from typing import Literal

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, insert, select, update

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.core.limits import LevelKind
from hitsend.serve.access.rows import Path, StoredPrincipal, changing, reading, terms_of, terms_values
from hitsend.serve.access.terms import Terms, TermsChange, changed, check_place, shown_limits
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import PRINCIPALS

PrincipalKind = Literal["org", "app", "user"]
FIELDS: dict[LevelKind, tuple[str, ...]] = {
    "global": (),
    "org": ("org",),
    "app": ("org", "app"),
    "user": ("org", "app", "user"),
}
"""What the parts of a level's path are; only the last one has to be there."""


class PrincipalInfo(msgspec.Struct, frozen=True):
    """A level as it is shown. `id` is its path with slashes between: a missing name is nothing between two of them."""

    id: str
    kind: LevelKind
    org: str | None
    app: str | None
    user: str | None
    limits: dict[str, int | str]
    models: tuple[str, ...] | None
    tier: int | None
    max_tier: int | None
    created_at: float | None
    disabled_at: float | None


class PrincipalStore:
    """The `principals` table."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(self, kind: PrincipalKind, path: Path, change: TermsChange) -> PrincipalInfo:
        """Store a new one. Raises InvalidRequest for names that can't be one or are taken, StorageFailed."""
        check_path(kind, path)
        made = StoredPrincipal(kind, path, changed(Terms(), change), self._clock.wall())

        def add(connection: Connection) -> None:
            if _row(connection, kind, path) is not None:
                raise InvalidRequest(f"{kind} {'/'.join(path)!r} exists already", param=kind)
            _insert(connection, made)

        await changing(self._database, add)
        return info(made)

    async def list(self, kind: PrincipalKind) -> tuple[PrincipalInfo, ...]:
        """All of a kind, oldest first, disabled ones too. Raises StorageFailed."""
        query = select(PRINCIPALS).where(PRINCIPALS.c.kind == kind)
        order = (PRINCIPALS.c.created_at, PRINCIPALS.c.org_name, PRINCIPALS.c.app_name, PRINCIPALS.c.user_name)
        async with reading(self._database) as connection:
            found = (await connection.execute(query.order_by(*order))).mappings()
            return tuple(info(principal_of(dict(row))) for row in found)

    async def load(self) -> tuple[StoredPrincipal, ...]:
        """All of every kind, with their terms. Raises StorageFailed."""
        async with reading(self._database) as connection:
            return tuple(principal_of(dict(row)) for row in (await connection.execute(select(PRINCIPALS))).mappings())

    async def get(self, kind: LevelKind, path: Path) -> PrincipalInfo:
        """One; the global level is always there. Raises NotFound, StorageFailed."""
        async with reading(self._database) as connection:
            found = await connection.run_sync(_row, kind, path)
        if found is None and kind != "global":
            raise _no_such(kind, path)
        return info(found or StoredPrincipal("global", (), Terms(), 0.0))

    async def change(
        self, kind: LevelKind, path: Path, change: TermsChange, *, is_disabled: bool | None = None
    ) -> PrincipalInfo:
        """Change its terms, and disable or enable it. Raises NotFound, InvalidRequest, StorageFailed."""
        now = self._clock.wall()

        def replace(connection: Connection) -> StoredPrincipal:
            found = _row(connection, kind, path)
            if found is None and kind != "global":
                raise _no_such(kind, path)
            before = found or StoredPrincipal("global", (), Terms(), now)
            disabled_at = before.disabled_at
            if is_disabled is not None:
                disabled_at = (disabled_at or now) if is_disabled else None
            after = msgspec.structs.replace(before, terms=changed(before.terms, change), disabled_at=disabled_at)
            if found is None:
                _insert(connection, after)
            else:
                values = terms_values(after.terms) | {"disabled_at": disabled_at}
                connection.execute(update(PRINCIPALS).where(_is(kind, path)).values(values))
            return after

        return info(await changing(self._database, replace))


def check_path(kind: LevelKind, path: Path) -> None:
    """Raises InvalidRequest for names that can't be of that kind."""
    fields = FIELDS[kind]
    assert len(path) == len(fields)
    for field, name in zip(fields, path, strict=True):
        check_place(field, name or (None if field != kind else ""))


def principal_of(row: dict[str, object]) -> StoredPrincipal:
    """A row of `principals`."""
    kind = msgspec.convert(row["kind"], LevelKind)
    path = tuple(str(row[f"{field}_name"]) for field in FIELDS[kind])
    created_at, disabled_at = row["created_at"], row["disabled_at"]
    return StoredPrincipal(
        kind,
        path,
        terms_of(row),
        msgspec.convert(created_at, float),
        msgspec.convert(disabled_at, float | None),
    )


def info(stored: StoredPrincipal) -> PrincipalInfo:
    """What is shown of it."""
    names: dict[str, str] = dict(zip(FIELDS[stored.kind], stored.path, strict=True))
    return PrincipalInfo(
        id="/".join(stored.path),
        kind=stored.kind,
        org=names.get("org") or None,
        app=names.get("app") or None,
        user=names.get("user") or None,
        limits=shown_limits(stored.terms.limits),
        models=stored.terms.models,
        tier=stored.terms.tier,
        max_tier=stored.terms.max_tier,
        created_at=stored.created_at or None,
        disabled_at=stored.disabled_at,
    )


def _is(kind: LevelKind, path: Path) -> ColumnElement[bool]:
    names = dict(zip(FIELDS[kind], path, strict=True))
    return and_(
        PRINCIPALS.c.kind == kind,
        *(PRINCIPALS.c[f"{field}_name"] == names.get(field, "") for field in FIELDS["user"]),
    )


def _row(connection: Connection, kind: LevelKind, path: Path) -> StoredPrincipal | None:
    found = connection.execute(select(PRINCIPALS).where(_is(kind, path))).mappings().first()
    return None if found is None else principal_of(dict(found))


def _insert(connection: Connection, made: StoredPrincipal) -> None:
    names = dict(zip(FIELDS[made.kind], made.path, strict=True))
    values = terms_values(made.terms) | {f"{field}_name": names.get(field, "") for field in FIELDS["user"]}
    values |= {"kind": made.kind, "created_at": made.created_at, "disabled_at": made.disabled_at}
    connection.execute(insert(PRINCIPALS).values(values))


def _no_such(kind: LevelKind, path: Path) -> NotFound:
    return NotFound(f"there is no {kind} {'/'.join(path)[:160]!r}", param=kind)
