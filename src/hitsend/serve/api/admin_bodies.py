"""What `/admin` reads and answers.

Enters: JSON bodies and path parameters. Leaves: typed changes, names, paths. Always true: an unknown or ill-typed field
is refused by name; a field that isn't sent stays as it is, null takes it away; USD are exact decimals in both
directions, as numbers or text; what goes out never holds a secret but once, when it was made. Next: `admin.py`.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from hitsend.core.errors import InvalidRequest, NotFound
from hitsend.core.limits import LevelKind
from hitsend.serve.access.keys import NewKey
from hitsend.serve.access.principals import FIELDS, PrincipalKind
from hitsend.serve.access.rows import Path
from hitsend.serve.access.store import KeyChange
from hitsend.serve.access.terms import TermsChange
from hitsend.serve.api import strict_json
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.policy import check_endpoints

_T = TypeVar("_T")


class KeyBody(KeyChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key to make: its name, the levels it belongs to (none: the global one), what it may do."""

    name: str
    org: str | None = None
    app: str | None = None
    user: str | None = None


class KeyPatch(KeyChange, frozen=True, forbid_unknown_fields=True):
    """What to change of a key."""


class RotateBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the secret that a key has now is good beside the new one: seconds, or a text such as 24h. 0 ends it now.

    `expires_at`: when the key ends, if that is to change.
    """

    overlap: str | int | float = 0
    expires_at: str | int | float | None = None


class OrgBody(TermsChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An organisation to make."""

    org: str


class AppBody(TermsChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An application to make, in an organisation or in none."""

    app: str
    org: str | None = None


class UserBody(TermsChange, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A user to make, of an application, of an organisation, or of neither."""

    user: str
    app: str | None = None
    org: str | None = None


class PrincipalPatch(TermsChange, frozen=True, forbid_unknown_fields=True):
    """What to change of an organisation, an application or a user. Disabled: every key beneath it is refused."""

    disabled: bool | UnsetType = UNSET


class LimitsBody(TermsChange, frozen=True, forbid_unknown_fields=True):
    """What to change for everybody."""


BODY_OF: dict[PrincipalKind, type[OrgBody | AppBody | UserBody]] = {"org": OrgBody, "app": AppBody, "user": UserBody}


async def read(exchange: Exchange, kind: type[_T]) -> _T:
    """The body. Raises InvalidRequest that names the field."""
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    tree, _ = strict_json.decode(body or b"{}", exchange.services.access.max_json_depth)
    return strict_json.typed(tree, kind)


async def read_key(exchange: Exchange, kind: type[_T]) -> _T:
    """The body of a key, whose endpoints have to be some of this server's."""
    body = await read(exchange, kind)
    endpoints = getattr(body, "endpoints", None)
    if isinstance(endpoints, tuple):
        check_endpoints(endpoints)
    return body


def path_of(kind: LevelKind, body: OrgBody | AppBody | UserBody) -> Path:
    """The path that a body names. Raises InvalidRequest for an empty name: null is how none is said."""
    for field in FIELDS[kind]:
        if getattr(body, field) == "":
            raise InvalidRequest(f"{field} must not be empty", param=field)
    return tuple(getattr(body, field) or "" for field in FIELDS[kind])


def path_in(kind: LevelKind, param: str) -> Path:
    """The path that a URL names, with slashes between; a missing name is nothing between two. Raises NotFound."""
    path = tuple(param.split("/"))
    if len(path) != len(FIELDS[kind]) or not path[-1]:
        raise NotFound(f"{kind} ids look like {'/'.join(FIELDS[kind])}", param=kind)
    return path


def made(key: NewKey) -> dict[str, Any]:
    """A new key, with its secret."""
    return {"id": key.id, "key": key.key, "name": key.name, "expires_at": key.expires_at}
