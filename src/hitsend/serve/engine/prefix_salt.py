"""Whose prefix cache a request may use: one salt per tenant, model, adapter and client's own salt.

A cached prefix answers sooner, so whoever shares one can find out what others asked. Nobody shares across salts.

Enters: who asks. Leaves: a salt. Always true: it is an HMAC under a secret that the engine's child drew when it
started, over parts that carry their name and length, so that no two different lists of parts have the same salt, and no
client can write one: what it sends only parts its own cache further. Next: `../loop/prefix_cache.py`.
"""

import hashlib
import hmac
from typing import Literal

from hitsend.serve.loop.messages import EngineFacts

Scope = Literal["org", "app", "user", "key"]
SCOPES: tuple[Scope, ...] = ("org", "app", "user", "key")


def salt_of(
    facts: EngineFacts, scope: Scope, tenant: tuple[str, ...], cache_salt: str | None, adapter: str | None = None
) -> str:
    """The salt of this tenant, as wide as `scope`; where nothing of that is known of it, the tenant is by itself.

    What an adapter computed is another model's cache.
    """
    shared = tenant[: SCOPES.index(scope) + 1]
    levels = shared if shared and shared[-1] else tenant
    parts = [("model", facts.model)]
    parts += [(f"tenant {number} of {len(levels)}", level) for number, level in enumerate(levels)]
    if adapter is not None:
        parts.append(("adapter", adapter))
    if cache_salt is not None:
        parts.append(("cache_salt", cache_salt))
    return tagged_hmac(bytes.fromhex(facts.cache_secret), parts)


def tagged_hmac(secret: bytes, parts: list[tuple[str, str]]) -> str:
    """Over names and values, each behind its length in bytes."""
    digest = hmac.new(secret, digestmod=hashlib.sha256)
    for words in parts:
        for word in words:
            data = word.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
