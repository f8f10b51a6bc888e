"""`/admin`: keys, organisations, applications, users and the limits above them all.

Enters: exchanges of admins. Leaves: JSON. Always true: it does what the command line does, through the same stores;
this server honours a change at once, others on the same database within two seconds; nothing is ever deleted: DELETE
revokes a key and disables the others. Next: `admin_bodies.py`.
"""

import contextlib
from collections.abc import Awaitable, Callable

from msgspec import UNSET

from hitsend.core.errors import NotFound, StorageFailed
from hitsend.serve.access.principals import PrincipalKind
from hitsend.serve.access.store import KeyOwner
from hitsend.serve.access.terms import TermsChange
from hitsend.serve.api.admin_bodies import (
    BODY_OF,
    KeyBody,
    KeyPatch,
    LimitsBody,
    PrincipalPatch,
    RotateBody,
    made,
    path_in,
    path_of,
    read,
    read_key,
)
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.services import Administration

Handler = Callable[[Exchange], Awaitable[None]]


async def list_keys(exchange: Exchange) -> None:
    """All keys, revoked ones too, without their secrets."""
    await exchange.answer_json({"object": "list", "data": await _administration(exchange).keys.list()})


async def create_key(exchange: Exchange) -> None:
    """Make a key. The answer is the only place where its secret is ever shown."""
    admin = _administration(exchange)
    body = await read_key(exchange, KeyBody)
    key = await admin.keys.create(KeyOwner(body.name, user=body.user, app=body.app, org=body.org), body)
    await _take_over(admin)
    await exchange.answer_json(made(key))


async def get_key(exchange: Exchange) -> None:
    """One key, without its secret. Raises NotFound."""
    await exchange.answer_json(await _administration(exchange).keys.get(exchange.param))


async def change_key(exchange: Exchange) -> None:
    """Change what a key may do. Raises NotFound."""
    admin = _administration(exchange)
    body = await read_key(exchange, KeyPatch)
    changed = await admin.keys.change(exchange.param, body)
    await _take_over(admin)
    await exchange.answer_json(changed)


async def rotate_key(exchange: Exchange) -> None:
    """Give a key another secret; the one it had is good for `overlap` longer. Raises NotFound."""
    admin = _administration(exchange)
    body = await read(exchange, RotateBody)
    key = await admin.keys.rotate(exchange.param, body.overlap, body.expires_at)
    await _take_over(admin)
    await exchange.answer_json(made(key))


async def revoke_key(exchange: Exchange) -> None:
    """End a key, for good. Raises NotFound."""
    admin = _administration(exchange)
    revoked = await admin.keys.revoke(exchange.param)
    await _take_over(admin)
    await exchange.answer_json(revoked)


async def get_limits(exchange: Exchange) -> None:
    """What holds for everybody."""
    await exchange.answer_json(await _administration(exchange).principals.get("global", ()))


async def change_limits(exchange: Exchange) -> None:
    """Change what holds for everybody."""
    await _change_limits(exchange, await read(exchange, LimitsBody))


async def clear_limits(exchange: Exchange) -> None:
    """Take away everything that holds for everybody."""
    await _change_limits(exchange, TermsChange(limits=None, models=None, tier=None, max_tier=None))


async def _change_limits(exchange: Exchange, change: TermsChange) -> None:
    admin = _administration(exchange)
    changed = await admin.principals.change("global", (), change)
    await _take_over(admin)
    await exchange.answer_json(changed)


async def _list(exchange: Exchange, kind: PrincipalKind) -> None:
    await exchange.answer_json({"object": "list", "data": await _administration(exchange).principals.list(kind)})


async def _create(exchange: Exchange, kind: PrincipalKind) -> None:
    admin = _administration(exchange)
    body = await read(exchange, BODY_OF[kind])
    created = await admin.principals.create(kind, path_of(kind, body), body)
    await _take_over(admin)
    await exchange.answer_json(created)


async def _get(exchange: Exchange, kind: PrincipalKind) -> None:
    admin = _administration(exchange)
    await exchange.answer_json(await admin.principals.get(kind, path_in(kind, exchange.param)))


async def _change(exchange: Exchange, kind: PrincipalKind) -> None:
    admin = _administration(exchange)
    path = path_in(kind, exchange.param)
    body = await read(exchange, PrincipalPatch)
    is_disabled = None if body.disabled is UNSET else body.disabled
    changed = await admin.principals.change(kind, path, body, is_disabled=is_disabled)
    await _take_over(admin)
    await exchange.answer_json(changed)


async def _disable(exchange: Exchange, kind: PrincipalKind) -> None:
    admin = _administration(exchange)
    path = path_in(kind, exchange.param)
    disabled = await admin.principals.change(kind, path, TermsChange(), is_disabled=True)
    await _take_over(admin)
    await exchange.answer_json(disabled)


_WORDS = {"org": "organisation", "app": "application", "user": "user"}


def _handler(work: Callable[[Exchange, PrincipalKind], Awaitable[None]], kind: PrincipalKind, words: str) -> Handler:
    async def handler(exchange: Exchange) -> None:
        await work(exchange, kind)

    handler.__doc__ = words.format(_WORDS[kind])
    return handler


def _routes_of(kind: PrincipalKind) -> dict[str, dict[str, Handler]]:
    return {
        f"/admin/{kind}s": {
            "GET": _handler(_list, kind, "Every {} that has terms, disabled ones too."),
            "POST": _handler(_create, kind, "Make one {}."),
        },
        f"/admin/{kind}s/{{id}}": {
            "GET": _handler(_get, kind, "One {}; its id is its path, with slashes between the names."),
            "PATCH": _handler(_change, kind, "Change one {}, or disable and enable it."),
            "DELETE": _handler(_disable, kind, "Disable one {}: every key beneath it is refused."),
        },
    }


ADMIN_ROUTES: dict[str, dict[str, Handler]] = {
    "/admin/keys": {"GET": list_keys, "POST": create_key},
    "/admin/keys/{id}/rotate": {"POST": rotate_key},
    "/admin/keys/{id}": {"GET": get_key, "PATCH": change_key, "DELETE": revoke_key},
    **_routes_of("org"),
    **_routes_of("app"),
    **_routes_of("user"),
    "/admin/limits": {"GET": get_limits, "PATCH": change_limits, "DELETE": clear_limits},
}
"""A part of `ROUTES`."""


def _administration(exchange: Exchange) -> Administration:
    """Raises NotFound where this server administers nothing."""
    admin = exchange.services.admin
    if admin is None:
        raise NotFound("keys are not administered here")
    return admin


async def _take_over(admin: Administration) -> None:
    """Honour at once what was stored just now. If it can't be read, the next second's look will find it."""
    with contextlib.suppress(StorageFailed):
        await admin.refresh()
