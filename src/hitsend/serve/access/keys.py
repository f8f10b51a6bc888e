"""API keys: how they look, how they are hashed.

Enters: random bytes. Leaves: a key to show once, and what may be stored of it. Always true: a key is
`hs_<id>_<secret>` with a public id of 48 bits and a secret of 256; a secret of that size needs no slow hash, so one
salted SHA-256 over the whole key is stored; the stored digest is itself no key. A rotation changes the secret and keeps
the id, so that limits, spending, records and stored responses go on. Next: `terms.py`.
"""

import hmac
import re
import secrets

import msgspec

from hitsend.core.request import Role
from hitsend.serve.access.terms import Terms, shown_limits

_KEY = re.compile(r"hs_([0-9a-f]{12})_[0-9a-f]{64}", re.ASCII)
_ID_BYTES = 6
_SECRET_BYTES = 32
_SALT_BYTES = 16


class StoredKey(msgspec.Struct, frozen=True):
    """A key as it is kept. The secret is not in it. Instants are seconds since the epoch.

    `previous_digest` is of the secret before the last rotation, good until `overlap_until`.
    """

    key_id: str
    salt: str
    digest: str
    name: str
    user: str | None
    app: str | None
    org: str | None
    created_at: float
    revoked_at: float | None = None
    role: Role = "caller"
    terms: Terms = Terms()
    endpoints: tuple[str, ...] | None = None
    expires_at: float | None = None
    previous_digest: str | None = None
    overlap_until: float | None = None
    rotated_at: float | None = None
    last_used_at: float | None = None


class KeyInfo(msgspec.Struct, frozen=True):
    """A key as it may be shown. `limits` are those that are set; USD as exact text."""

    id: str
    name: str
    user: str | None
    app: str | None
    org: str | None
    created_at: float
    revoked_at: float | None
    role: Role
    limits: dict[str, int | str]
    models: tuple[str, ...] | None
    endpoints: tuple[str, ...] | None
    tier: int | None
    max_tier: int | None
    expires_at: float | None
    rotated_at: float | None
    overlap_until: float | None
    last_used_at: float | None


class NewKey(msgspec.Struct, frozen=True):
    """A key just made: `key` is the only copy of the secret there will ever be."""

    id: str
    key: str
    name: str
    expires_at: float | None = None

    def __repr__(self) -> str:
        return f"NewKey(id={self.id!r}, name={self.name!r})"


def make_key(key_id: str | None = None) -> tuple[str, str]:
    """A new (id, whole key); another secret for that id, if one is given."""
    key_id = key_id or secrets.token_hex(_ID_BYTES)
    return key_id, f"hs_{key_id}_{secrets.token_hex(_SECRET_BYTES)}"


def make_salt() -> str:
    """A new salt, as hex."""
    return secrets.token_hex(_SALT_BYTES)


def digest(salt: str, key: str) -> str:
    """What is stored of a key."""
    return hmac.digest(bytes.fromhex(salt), key.encode("utf-8", "surrogatepass"), "sha256").hex()


def id_of(key: str) -> str | None:
    """The id inside a well-formed key."""
    found = _KEY.fullmatch(key)
    return None if found is None else found[1]


def info(stored: StoredKey) -> KeyInfo:
    """What may be shown of a stored key."""
    return KeyInfo(
        id=stored.key_id,
        name=stored.name,
        user=stored.user,
        app=stored.app,
        org=stored.org,
        created_at=stored.created_at,
        revoked_at=stored.revoked_at,
        role=stored.role,
        limits=shown_limits(stored.terms.limits),
        models=stored.terms.models,
        endpoints=stored.endpoints,
        tier=stored.terms.tier,
        max_tier=stored.terms.max_tier,
        expires_at=stored.expires_at,
        rotated_at=stored.rotated_at,
        overlap_until=stored.overlap_until,
        last_used_at=stored.last_used_at,
    )
