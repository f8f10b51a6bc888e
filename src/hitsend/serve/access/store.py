"""Keys in the database: create, list, revoke.

Enters: names. Leaves: keys. Always true: nothing is ever deleted (a revoked key stays, so that revoking the last one
does not open the server to anonymous callers); names are short and printable, they end up in logs, rows and
terminals. Next: `auth.py`.
"""

import msgspec
from sqlalchemy import insert, select, update

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.serve.access.keys import KeyInfo, NewKey, StoredKey, digest, info, make_key, make_salt
from hitsend.serve.database.connection import Database
from hitsend.serve.database.schema import KEYS

MAX_NAME_CHARS = 128


class KeyOwner(msgspec.Struct, frozen=True):
    """Whom a key speaks for: a name for people, and the levels above it."""

    name: str
    user: str | None = None
    app: str | None = None
    org: str | None = None


class KeyStore:
    """The `keys` table."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock

    async def create(self, owner: KeyOwner) -> NewKey:
        """Make and store a key. Raises InvalidRequest for a name that is empty, too long or not printable."""
        for field, value in msgspec.structs.asdict(owner).items():
            _check_name(field, value)
        key_id, key = make_key()
        salt = make_salt()
        values = {
            "key_id": key_id,
            "salt": salt,
            "digest": digest(salt, key),
            "key_name": owner.name,
            "user_name": owner.user,
            "app_name": owner.app,
            "org_name": owner.org,
            "created_at": self._clock.wall(),
        }
        async with self._database.writing() as connection:
            await connection.execute(insert(KEYS).values(values))
        return NewKey(key_id, key, owner.name)

    async def list(self) -> tuple[KeyInfo, ...]:
        """All keys, revoked ones too, oldest first."""
        return tuple(info(stored) for stored in await self.load())

    async def load(self) -> tuple[StoredKey, ...]:
        """All keys with their digests, for the authenticator."""
        columns = (
            KEYS.c.key_id,
            KEYS.c.salt,
            KEYS.c.digest,
            KEYS.c.key_name,
            KEYS.c.user_name,
            KEYS.c.app_name,
            KEYS.c.org_name,
            KEYS.c.created_at,
            KEYS.c.revoked_at,
        )
        async with self._database.reading() as connection:
            found = await connection.execute(select(*columns).order_by(KEYS.c.created_at, KEYS.c.key_id))
            return tuple(StoredKey(*row) for row in found)

    async def revoke(self, key_id: str) -> KeyInfo:
        """End a key, for good; a second time changes nothing. Raises NotFound."""
        async with self._database.writing() as connection:
            await connection.execute(
                update(KEYS)
                .where(KEYS.c.key_id == key_id, KEYS.c.revoked_at.is_(None))
                .values(revoked_at=self._clock.wall())
            )
        for stored in await self.list():
            if stored.id == key_id:
                return stored
        raise NotFound("there is no key with that id", param="id")


def _check_name(field: str, value: str | None) -> None:
    if value is None and field != "name":
        return
    if not value or not value.isprintable() or value != value.strip():
        raise InvalidRequest(f"{field} must be printable text without spaces around it", param=field)
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{field} has {len(value)} characters, limit {MAX_NAME_CHARS}", param=field)
