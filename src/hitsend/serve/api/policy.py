"""Who may use which route.

Enters: a principal and a route's template. Leaves: nothing, or PermissionDenied. Always true: every route has its line
here (a test compares them with `ROUTES`), and a route without one is nobody's; a role opens a route, a key's own list
of endpoints closes it again; on the machine's own loopback, while no key exists, the caller is the machine's owner and
may do everything. Next: `routes.py`.
"""

from typing import Literal

from hitsend.core.errors import InvalidRequest, PermissionDenied
from hitsend.core.request import Principal, Role

Policy = Literal["open", "known", "infer", "own", "watch", "admin"]
"""open: anybody, without a key. known: every caller. infer: who may let models work. own: every caller, who sees what
is its own unless its role sees all. watch: who sees what everybody does. admin: who may change who may do what."""

ROLES: dict[Policy, tuple[Role, ...]] = {
    "open": ("admin", "reader", "caller"),
    "known": ("admin", "reader", "caller"),
    "infer": ("admin", "caller"),
    "own": ("admin", "reader", "caller"),
    "watch": ("admin", "reader"),
    "admin": ("admin",),
}

POLICIES: dict[str, Policy] = {
    "/": "known",
    "/v1/chat/completions": "infer",
    "/v1/chat/completions/input_tokens": "infer",
    "/v1/chat/completions/render": "infer",
    "/v1/completions": "infer",
    "/v1/embeddings": "infer",
    "/v1/estimate": "infer",
    "/v1/routes/explain": "infer",
    "/v1/responses": "infer",
    "/v1/responses/input_tokens": "infer",
    "/v1/responses/{id}/input_items": "infer",
    "/v1/responses/{id}": "infer",
    "/v1/files": "infer",
    "/v1/files/{id}/content": "infer",
    "/v1/files/{id}": "infer",
    "/v1/batches": "infer",
    "/v1/batches/{id}/cancel": "infer",
    "/v1/batches/{id}": "infer",
    "/v1/messages": "infer",
    "/v1/messages/count_tokens": "infer",
    "/v1/models": "known",
    "/v1/models/{id}": "known",
    "/tokenize": "infer",
    "/detokenize": "infer",
    "/docs": "known",
    "/inspect": "known",
    "/inspect/live": "own",
    "/inspect/percentiles": "own",
    "/inspect/plan": "known",
    "/inspect/usage": "own",
    "/inspect/requests": "own",
    "/inspect/requests/{id}/tokens": "own",
    "/inspect/requests/{id}": "own",
    "/inspect/requests/{id}/explain": "own",
    "/inspect/state": "watch",
    "/inspect/web/{id}": "known",
    "/metrics": "watch",
    "/admin/keys": "admin",
    "/admin/keys/{id}/rotate": "admin",
    "/admin/keys/{id}": "admin",
    "/admin/orgs": "admin",
    "/admin/orgs/{id}": "admin",
    "/admin/apps": "admin",
    "/admin/apps/{id}": "admin",
    "/admin/users": "admin",
    "/admin/users/{id}": "admin",
    "/admin/limits": "admin",
    "/admin/usage": "watch",
    "/admin/ledger": "watch",
    "/admin/reconcile": "watch",
    "/healthz": "open",
    "/readyz": "known",
    "/openapi.json": "known",
}

OPEN_TO_ALL = frozenset(route for route, policy in POLICIES.items() if policy == "open")


def check_rights(principal: Principal, route: str) -> None:
    """Raises PermissionDenied that names the route, and what it would take."""
    if principal.is_anonymous:
        return
    roles = ROLES[POLICIES[route]] if route in POLICIES else ()
    if principal.role not in roles:
        raise PermissionDenied(f"{route} is for {' and '.join(roles) or 'nobody'}: this caller is a {principal.role}")
    if principal.endpoints is not None and not any(covers(endpoint, route) for endpoint in principal.endpoints):
        raise PermissionDenied(f"this key may not use {route}")


def sees_all(principal: Principal) -> bool:
    """Whether what other callers did may be shown, too."""
    return principal.is_anonymous or principal.role in ROLES["watch"]


def covers(endpoint: str, route: str) -> bool:
    """Whether a route is that endpoint, or lies below it."""
    return route == endpoint or route.startswith(f"{endpoint}/")


def check_endpoints(endpoints: tuple[str, ...]) -> None:
    """Raises InvalidRequest for one that no route begins with: a key that can't do anything was meant otherwise."""
    for index, endpoint in enumerate(endpoints):
        if not any(covers(endpoint, route) for route in POLICIES):
            where = f"endpoints[{index}]"
            raise InvalidRequest(f"{where}: no route is or begins with {endpoint[:80]!r}", param=where)
