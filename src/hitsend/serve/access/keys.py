"""API keys: how they look, how they are hashed.

Enters: random bytes. Leaves: a key to show once, and what may be stored of it. Always true: a key is
`hs_<id>_<secret>` with a public id of 48 bits and a secret of 256; a secret of that size needs no slow hash, so one
salted SHA-256 over the whole key is stored; the stored digest is itself no key. Next: `store.py`.
"""

import hmac
import re
import secrets

import msgspec

_KEY = re.compile(r"hs_([0-9a-f]{12})_[0-9a-f]{64}", re.ASCII)
_ID_BYTES = 6
_SECRET_BYTES = 32
_SALT_BYTES = 16


class StoredKey(msgspec.Struct, frozen=True):
    """A key as it is kept. The secret is not in it. Instants are seconds since the epoch."""

    key_id: str
    salt: str
    digest: str
    name: str
    user: str | None
    app: str | None
    org: str | None
    created_at: float
    revoked_at: float | None = None


class KeyInfo(msgspec.Struct, frozen=True):
    """A key as it may be shown."""

    id: str
    name: str
    user: str | None
    app: str | None
    org: str | None
    created_at: float
    revoked_at: float | None


class NewKey(msgspec.Struct, frozen=True):
    """A key just made: `key` is the only copy of the secret there will ever be."""

    id: str
    key: str
    name: str

    def __repr__(self) -> str:
        return f"NewKey(id={self.id!r}, name={self.name!r})"


def make_key() -> tuple[str, str]:
    """A new (id, whole key)."""
    key_id = secrets.token_hex(_ID_BYTES)
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
    )
