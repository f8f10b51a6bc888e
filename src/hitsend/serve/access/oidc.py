"""From an issuer's signed token to a principal.

Enters: a JWT that a caller presented. Leaves: a `Principal`, or nothing. Always true: the signature is checked with a
key of the configured issuer and an algorithm that the settings allow for that key (what the token's header says of
keys, addresses or algorithms chooses nothing); issuer, audience, expiry and subject must be there and right; a token is
never logged nor kept; a subject has an id of its own, so that its records and answers are nobody else's. Next:
`jwks.py`.
"""

import hashlib
from typing import Any, get_args

import jwt
import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Principal, Role
from hitsend.serve.access.jwks import KeySet
from hitsend.serve.access.rights import Directory, Names
from hitsend.serve.access.terms import check_name
from hitsend.settings import OidcSettings

_ROLES: tuple[Role, ...] = get_args(Role)
_ID_CHARS = 24


class TokenVerifier:
    """Verifies tokens of the one configured issuer."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self.keys = KeySet(str(settings.jwks_url), settings.algorithms, settings.refresh_s)

    async def start(self) -> None:
        """Begin to fetch the issuer's keys."""
        await self.keys.start()

    async def stop(self) -> None:
        """Stop it. Safe to call twice."""
        await self.keys.stop()

    def principal(self, token: str, directory: Directory) -> Principal | None:
        """Whom a token speaks for, None for one that isn't good, or whose organisation, application or user is off."""
        claims = self._verified(token)
        return None if claims is None else self._principal(claims, directory)

    def _verified(self, token: str) -> dict[str, Any] | None:
        settings = self._settings
        try:
            key = self.keys.find(jwt.get_unverified_header(token).get("kid"))
            if key is None:
                return None
            return jwt.decode(
                token,
                key.key,
                algorithms=list(key.algorithms),
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_s,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            return None

    def _principal(self, claims: dict[str, Any], directory: Directory) -> Principal | None:
        settings = self._settings
        subject = str(claims["sub"])
        try:
            names = Names(
                user=_name(claims, settings.user_claim),
                app=_name(claims, settings.app_claim),
                org=_name(claims, settings.org_claim),
            )
            check_name("name", names.user or subject)
        except InvalidRequest:
            return None
        principal = directory.compose(names, role=_role(claims, settings.role_claim))
        if principal is None:
            return None
        caller = hashlib.sha256(msgspec.json.encode((settings.issuer, subject))).hexdigest()[:_ID_CHARS]
        return msgspec.structs.replace(principal, key_id=f"jwt_{caller}", name=names.user or subject)


def _claim(claims: dict[str, Any], path: str) -> Any:
    """What stands there; a whole name first, then dots as steps inward."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for step in path.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _name(claims: dict[str, Any], path: str | None) -> str | None:
    """A name from a claim. Raises InvalidRequest for one that isn't there or can't be a name: nobody gets out from
    under an organisation's limits by a token that doesn't name it."""
    if path is None:
        return None
    found = _claim(claims, path)
    if not isinstance(found, str):
        raise InvalidRequest("a claim that should be a name isn't text")
    check_name("name", found)
    return found


def _role(claims: dict[str, Any], path: str | None) -> Role:
    """The highest of hitsend's roles that the claim names; without one, a caller."""
    found = None if path is None else _claim(claims, path)
    given = found if isinstance(found, list) else [found]
    return next((role for role in _ROLES if role in given), "caller")
