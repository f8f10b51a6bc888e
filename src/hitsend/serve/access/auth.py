"""From an Authorization header to a principal, without waiting.

Enters: the header's value and the peer's address. Leaves: a `Principal`, else InvalidApiKey (which never says why).
Always true: keys are read into memory once a second, so a running server honours a change within two; a lookup goes by
the key's public id and is decided by a constant-time comparison over the whole key, with the same work for unknown ids;
anonymous callers pass only while no key was ever made, and only from this machine. Next: `api/`.
"""

import asyncio
import hmac
import ipaddress
import logging

from sqlalchemy.exc import SQLAlchemyError

from hitsend.core.errors import InvalidApiKey
from hitsend.core.request import Principal
from hitsend.serve.access.keys import StoredKey, digest, id_of, make_salt
from hitsend.serve.access.store import KeyStore

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
MAX_CHARS = 512
"""Longest header value looked at; a key is 80 characters."""


class Authenticator:
    """The keys in force, in memory."""

    def __init__(self, store: KeyStore) -> None:
        self._store = store
        self._keys: dict[str, StoredKey] = {}
        self._are_keys_required = True
        self._nobody_salt = make_salt()
        self._nobody_digest = digest(self._nobody_salt, make_salt())
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys, then keep reading them. Until then everybody is refused. Raises what the database raises."""
        await self.refresh()
        self._task = asyncio.create_task(self._keep_fresh(), name="keys")

    async def stop(self) -> None:
        """End the background task. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    @property
    def are_keys_required(self) -> bool:
        """Whether a key exists, so that nobody is anonymous any more. Revoked keys count."""
        return self._are_keys_required

    async def refresh(self) -> None:
        """Take over the keys as they stand in the database now."""
        stored = await self._store.load()
        self._keys = {key.key_id: key for key in stored if key.revoked_at is None}
        self._are_keys_required = bool(stored)

    def authenticate(self, authorization: str | None, client_host: str | None) -> Principal:
        """Who this is. `client_host` is the peer's address as the socket says it, never a forwarded header."""
        if not self._are_keys_required:
            if is_loopback(client_host):
                return Principal()
            raise InvalidApiKey("no API key is set up, so only this machine is served: see `hitsend keys create`")
        key = self._matching(_bearer(authorization))
        if key is None:
            raise InvalidApiKey("missing or wrong API key: send `Authorization: Bearer hs_…`")
        return Principal(key_id=key.key_id, name=key.name, user=key.user, app=key.app, org=key.org)

    def _matching(self, presented: str) -> StoredKey | None:
        key_id = id_of(presented)
        key = None if key_id is None else self._keys.get(key_id)
        salt, expected = (self._nobody_salt, self._nobody_digest) if key is None else (key.salt, key.digest)
        is_same = hmac.compare_digest(digest(salt, presented), expected)
        return key if is_same else None

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except SQLAlchemyError as error:
                logger.warning("API keys can't be read (%s): the last known ones stay in force", type(error).__name__)


def is_loopback(host: str | None) -> bool:
    """Whether a peer's address is this machine's own. Unknown and unreadable addresses are not."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _bearer(authorization: str | None) -> str:
    """The presented key, or something that is none."""
    if authorization is None or len(authorization) > MAX_CHARS:
        return ""
    scheme, _, value = authorization.partition(" ")
    return value.strip(" ") if scheme.lower() == "bearer" else ""
