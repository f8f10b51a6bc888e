"""From what was granted on every level to what one caller may do.

Enters: the levels' terms, a key's own, a caller's names. Leaves: a `Principal`; refusals that name what isn't allowed.
Always true: `levels` go from global down to the key and hold only those with limits; what may be used is what every
level allows; a level that is disabled refuses everybody beneath it; the tier is that of the nearest level which has
one, and never better than the worst `max_tier` above. Next: `auth.py`.
"""

from collections.abc import Iterable, Iterator

import msgspec

from hitsend.core.errors import ModelNotFound, PermissionDenied
from hitsend.core.limits import Level, LevelKind, Limits
from hitsend.core.request import Principal, Role
from hitsend.serve.access.keys import StoredKey
from hitsend.serve.access.rows import Path, StoredPrincipal
from hitsend.serve.access.terms import Terms

NO_LIMITS = Limits()
USUAL_TIER = 1


class Names(msgspec.Struct, frozen=True):
    """Where a caller belongs."""

    user: str | None = None
    app: str | None = None
    org: str | None = None


class Directory:
    """All levels that have terms."""

    def __init__(self, principals: Iterable[StoredPrincipal] = ()) -> None:
        self._by_path = {(one.kind, one.path): one for one in principals}

    def principal_of(self, key: StoredKey) -> Principal | None:
        """Whom a key speaks for, or None where a level above it is disabled."""
        names = Names(key.user, key.app, key.org)
        own = Level("key", (key.key_id,), key.terms.limits)
        principal = self.compose(names, key.terms, own, role=key.role)
        if principal is None:
            return None
        return msgspec.structs.replace(principal, key_id=key.key_id, name=key.name, endpoints=key.endpoints)

    def compose(
        self, names: Names, own: Terms | None = None, own_level: Level | None = None, *, role: Role = "caller"
    ) -> Principal | None:
        """What these levels come to together, or None where one of them is disabled."""
        above = [found for place in places(names) if (found := self._by_path.get(place)) is not None]
        if any(one.disabled_at is not None for one in above):
            return None
        levels = [Level(one.kind, one.path, one.terms.limits) for one in above]
        levels += [own_level] if own_level is not None else []
        terms = [one.terms for one in above] + ([own] if own is not None else [])
        tier, max_tier = _tiers(terms)
        return Principal(
            user=names.user,
            app=names.app,
            org=names.org,
            role=role,
            levels=tuple(level for level in levels if level.limits != NO_LIMITS),
            models=_models(terms),
            tier=tier,
            max_tier=max_tier,
        )


def places(names: Names) -> Iterator[tuple[LevelKind, Path]]:
    """The levels above a caller, from global down; a name that it doesn't have is "" in the paths below."""
    org, app = names.org or "", names.app or ""
    yield "global", ()
    if names.org is not None:
        yield "org", (org,)
    if names.app is not None:
        yield "app", (org, app)
    if names.user is not None:
        yield "user", (org, app, names.user)


def check_model(principal: Principal, model: str, served: Iterable[str]) -> None:
    """Raises PermissionDenied for a served model that isn't this caller's, ModelNotFound for one that nobody serves."""
    if model in served and principal.models is not None and model not in principal.models:
        raise PermissionDenied(f"this caller may not use the model {model!r}", param="model")
    if model not in served:
        usable = ", ".join(name for name in served if may_use(principal, name))
        raise ModelNotFound(f"model {model[:100]!r} is not served here; served: {usable or 'none'}", param="model")


def may_use(principal: Principal, model: str) -> bool:
    """Whether a model is among those of this caller."""
    return principal.models is None or model in principal.models


def _models(terms: Iterable[Terms]) -> tuple[str, ...] | None:
    allowed: tuple[str, ...] | None = None
    for one in terms:
        if one.models is not None:
            allowed = one.models if allowed is None else tuple(name for name in allowed if name in one.models)
    return allowed


def _tiers(terms: list[Terms]) -> tuple[int, int]:
    tier = next((one.tier for one in reversed(terms) if one.tier is not None), USUAL_TIER)
    bounds = [one.max_tier for one in terms if one.max_tier is not None]
    best = max(bounds) if bounds else tier
    return max(tier, best), best
