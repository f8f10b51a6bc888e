"""From an Authorization header to a principal, without waiting.

Enters: the header's value and the peer's address. Leaves: a `Principal`, else InvalidApiKey (which never says why).
Always true: once a second it is asked whether anything changed, and only then everything is read into memory again, so
a running server honours a change within two; a lookup goes by the key's public id and is decided by constant-time
comparisons over the whole key, with the same work for unknown ids; anonymous callers pass only while no key was ever
made and no issuer is set, and only from this machine. Next: `oidc.py`.
"""

import asyncio
import hmac
import ipaddress
import logging
import time
from functools import lru_cache
from typing import Protocol

import msgspec

from hitsend.core.errors import InvalidApiKey, StorageFailed
from hitsend.core.request import Principal
from hitsend.serve.access.keys import StoredKey, digest, id_of, make_salt
from hitsend.serve.access.rights import Directory, Names
from hitsend.serve.access.store import KeyStore

logger = logging.getLogger(__name__)

REFRESH_S = 1.0
TOUCH_S = 30.0
"""How long the last uses of keys are collected before they are written."""
MAX_CHARS = 512
"""Longest header value in which a key is looked for; a key is 80 characters."""
MAX_TOKEN_CHARS = 16_384
"""The same for an issuer's token."""
_WRONG = "missing or wrong API key: send `Authorization: Bearer hs_…`"


class Tokens(Protocol):
    """Who else can vouch for callers; `oidc.py`."""

    def principal(self, token: str, directory: Directory) -> Principal | None:
        """Whom a token speaks for, None for one that isn't good. Never waits."""
        ...

    async def start(self) -> None:
        """Begin to fetch the issuer's keys."""
        ...

    async def stop(self) -> None:
        """Stop it. Safe to call twice."""
        ...


class Authenticator:
    """The keys in force, in memory."""

    def __init__(self, store: KeyStore, tokens: Tokens | None = None) -> None:
        self._store = store
        self._tokens = tokens
        self._version: int | None = None
        self._keys: dict[str, StoredKey] = {}
        self._directory = Directory()
        self._principals: dict[str, Principal | None] = {}
        self._anonymous: Principal | None = Principal()
        self._are_keys_required = True
        salt = make_salt()
        self._nobody = StoredKey("", salt, digest(salt, make_salt()), "", user=None, app=None, org=None, created_at=0.0)
        self._used: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the keys, then keep reading them. Until then everybody is refused. Raises StorageFailed."""
        await self.refresh()
        if self._tokens is not None:
            await self._tokens.start()
        self._task = asyncio.create_task(self._keep_fresh(), name="keys")

    async def stop(self) -> None:
        """End the background task, and note the last uses. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
            await self._write_uses()
        if self._tokens is not None:
            await self._tokens.stop()

    @property
    def are_keys_required(self) -> bool:
        """Whether a key exists or an issuer is set, so that nobody is anonymous any more. Revoked keys count."""
        return self._are_keys_required

    async def refresh(self) -> None:
        """Take over what has changed in the database. Raises StorageFailed."""
        read = await self._store.snapshot(self._version)
        if read is None or (self._version is not None and read.version < self._version):
            return
        self._version = read.version
        self._directory = Directory(read.principals)
        self._principals = {}
        self._keys = {key.key_id: key for key in read.keys if key.revoked_at is None}
        self._anonymous = self._directory.compose(Names())
        self._are_keys_required = bool(read.keys) or self._tokens is not None

    def authenticate(self, authorization: str | None, client_host: str | None) -> Principal:
        """Who this is. `client_host` is the peer's address as the socket says it, never a forwarded header."""
        if not self._are_keys_required:
            if is_loopback(client_host) and self._anonymous is not None:
                return self._anonymous
            raise InvalidApiKey("no API key is set up, so only this machine is served: see `hitsend keys create`")
        token = _bearer(authorization, MAX_TOKEN_CHARS) if self._tokens is not None else ""
        if self._tokens is not None and token.count(".") == 2:
            principal = self._tokens.principal(token, self._directory)
        else:
            principal = self._of_key(_bearer(authorization, MAX_CHARS))
        if principal is None:
            raise InvalidApiKey(_WRONG)
        return principal

    def standing(self, caller: Principal) -> Principal | None:
        """What somebody who was known before may do now; None: nothing any more. For work that goes on without them."""
        if caller.key_id is None:
            return None if self._are_keys_required else self._anonymous
        if self._tokens is not None and caller.key_id.startswith("jwt_"):
            now = self._directory.compose(Names(caller.user, caller.app, caller.org), role=caller.role)
            return None if now is None else msgspec.structs.replace(now, key_id=caller.key_id, name=caller.name)
        return self._in_force(self._keys.get(caller.key_id), self._store.clock.wall())

    def _of_key(self, presented: str) -> Principal | None:
        now = self._store.clock.wall()
        return self._in_force(self._matching(presented, now), now)

    def _in_force(self, key: StoredKey | None, now: float) -> Principal | None:
        if key is None or (key.expires_at is not None and key.expires_at <= now):
            return None
        if key.key_id not in self._principals:
            self._principals[key.key_id] = self._directory.principal_of(key)
        principal = self._principals[key.key_id]
        if principal is not None:
            self._used[key.key_id] = now
        return principal

    def _matching(self, presented: str, now: float) -> StoredKey | None:
        """The key whose secret this is, or was before its last rotation while that is still good."""
        key = self._keys.get(id_of(presented) or "", self._nobody)
        shown = digest(key.salt, presented)
        is_current = hmac.compare_digest(shown, key.digest)
        is_previous = hmac.compare_digest(shown, key.previous_digest or self._nobody.digest)
        is_overlap = is_previous and key.overlap_until is not None and now < key.overlap_until
        return key if is_current or is_overlap else None

    async def _keep_fresh(self) -> None:
        written_at = time.monotonic()
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except StorageFailed as error:
                logger.warning("%s: the last known keys stay in force", error.message)
            if time.monotonic() - written_at >= TOUCH_S:
                written_at = time.monotonic()
                await self._write_uses()

    async def _write_uses(self) -> None:
        """One transaction for all keys that were used since the last one."""
        used, self._used = self._used, {}
        if not used:
            return
        try:
            await self._store.touch(used)
        except StorageFailed as error:
            self._used = used | self._used
            logger.warning("%s: tried again later", error.message)


@lru_cache(maxsize=1024)
def is_loopback(host: str | None) -> bool:
    """Whether a peer's address is this machine's own. Unknown and unreadable addresses are not."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _bearer(authorization: str | None, most: int) -> str:
    """The presented key or token, or something that is none."""
    if authorization is None or len(authorization) > most:
        return ""
    scheme, _, value = authorization.partition(" ")
    return value.strip(" ") if scheme.lower() == "bearer" else ""
