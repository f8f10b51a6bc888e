"""An issuer's public keys, fetched from one configured address.

Enters: the address. Leaves: keys by their id. Always true: fetching happens in the background, never for a request that
waits; it is bounded in time, bytes, keys and number (an unknown id makes at most one fetch a minute, whatever callers
send); redirects are not followed; a key may verify only with the allowed algorithms that fit its kind; when the issuer
can't be reached, the last known keys stay. Next: `auth.py`.
"""

import asyncio
import contextlib
import logging
import time
from typing import Any

import aiohttp
import msgspec
from jwt import PyJWK
from jwt.exceptions import PyJWTError

logger = logging.getLogger(__name__)

MIN_PAUSE_S = 60.0
"""Least time between a fetch and another one that an unknown key id asks for."""
RETRY_S = 10.0
FETCH_TIMEOUT_S = 5.0
MAX_BYTES = 512 * 1024
MAX_KEYS = 100
MIN_RSA_BITS = 2048

_FITTING = {
    ("RSA", None): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
}


class VerifyingKey(msgspec.Struct, frozen=True):
    """A public key and what it may be used with."""

    key: Any
    algorithms: tuple[str, ...]


class _Document(msgspec.Struct, frozen=True):
    keys: list[dict[str, Any]]


class KeySet:
    """The issuer's keys, in memory."""

    def __init__(self, url: str, algorithms: tuple[str, ...], refresh_s: float) -> None:
        self._url = url
        self._algorithms = algorithms
        self._refresh_s = refresh_s
        self._keys: dict[str | None, VerifyingKey] = {}
        self._fetched_at = float("-inf")
        self._is_wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.num_fetches = 0

    async def start(self) -> None:
        """Fetch once, then keep fetching. A failure is logged and tried again: no token is good until it succeeds."""
        self._task = asyncio.create_task(self._keep_fresh(is_fresh=await self._fetch()), name="issuer's keys")

    async def stop(self) -> None:
        """End the background task. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None

    def find(self, key_id: str | None) -> VerifyingKey | None:
        """The key of that id; of a token without one, the only key there is. An unknown id may start a fetch."""
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        found = self._keys.get(key_id)
        if found is None and time.monotonic() - self._fetched_at >= MIN_PAUSE_S:
            self._is_wanted.set()
        return found

    async def _keep_fresh(self, *, is_fresh: bool) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_s if is_fresh else RETRY_S):
                    await self._is_wanted.wait()
            is_fresh = await self._fetch()

    async def _fetch(self) -> bool:
        self._fetched_at = time.monotonic()
        self._is_wanted.clear()
        self.num_fetches += 1
        try:
            body = await self._read()
            keys = usable(msgspec.json.decode(body, type=_Document).keys, self._algorithms)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.MsgspecError) as error:
            logger.warning("the issuer's keys can't be read (%s): the last known ones stay", type(error).__name__)
            return False
        self._keys = keys
        return True

    async def _read(self) -> bytes:
        timeout = aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False) as session,
            session.get(self._url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_chunked(64 * 1024):
                body += piece
                if len(body) > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES} bytes")
            return bytes(body)


def usable(keys: list[dict[str, Any]], algorithms: tuple[str, ...]) -> dict[str | None, VerifyingKey]:
    """Those keys that may verify signatures, by id. Raises ValueError for too many; others are passed over."""
    if len(keys) > MAX_KEYS:
        raise ValueError(f"{len(keys)} keys, limit {MAX_KEYS}")
    found: dict[str | None, VerifyingKey] = {}
    for jwk in keys:
        key_id = jwk.get("kid")
        key = _verifying(jwk, algorithms)
        if key is not None and (key_id is None or isinstance(key_id, str)) and key_id not in found:
            found[key_id] = key
    return found


def _verifying(jwk: dict[str, Any], algorithms: tuple[str, ...]) -> VerifyingKey | None:
    is_for_signatures = jwk.get("use", "sig") == "sig" and "verify" in jwk.get("key_ops", ["verify"])
    fitting = _FITTING.get((str(jwk.get("kty")), jwk.get("crv")), ())
    allowed = tuple(name for name in fitting if name in algorithms and jwk.get("alg", name) == name)
    if not is_for_signatures or not allowed or "d" in jwk:
        return None
    try:
        key = PyJWK(jwk, allowed[0]).key
    except (PyJWTError, ValueError, TypeError):
        return None
    if jwk["kty"] == "RSA" and key.key_size < MIN_RSA_BITS:
        return None
    return VerifyingKey(key, allowed)
