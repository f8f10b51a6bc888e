"""The routes, and what every request passes before it reaches one.

Enters: ASGI scopes. Leaves: responses. Always true: the order is request id, Host, caller, route, method, rights,
handler, and nothing is read or computed for a caller who isn't known (only `/healthz` needs no key); a route is matched
on the scope's path alone; whatever a handler raises becomes a status here, unless the response has begun. Next:
`exchange.py`.
"""

from collections.abc import Awaitable, Callable

from hitsend.core.errors import ClientGone, MethodNotAllowed, NotFound
from hitsend.serve.api import (
    admin_books,
    batches,
    chat_completions,
    completions,
    dry_runs,
    embeddings,
    files,
    idempotent,
    inspect,
    inspect_search,
    live,
    messages,
    messages_errors,
    openapi,
    own_usage,
    plan,
    responses,
    tokens,
)
from hitsend.serve.api.admin import ADMIN_ROUTES
from hitsend.serve.api.credentials import presented_key
from hitsend.serve.api.errors import error_body, error_headers, public
from hitsend.serve.api.exchange import Exchange, RequestIds, Scope
from hitsend.serve.api.hosts import check_direct, check_host, check_origin, host_name
from hitsend.serve.api.policy import OPEN_TO_ALL, check_rights
from hitsend.serve.api.services import Services
from hitsend.serve.stream.deliver import Receive, Send

Handler = Callable[[Exchange], Awaitable[None]]

ROUTES: dict[str, dict[str, Handler]] = {
    "/": {"GET": inspect.page},
    "/v1/chat/completions": {"POST": chat_completions.chat_completions},
    "/v1/chat/completions/input_tokens": {"POST": dry_runs.input_tokens},
    "/v1/chat/completions/render": {"POST": dry_runs.render},
    "/v1/completions": {"POST": completions.completions},
    "/v1/embeddings": {"POST": embeddings.embeddings},
    "/v1/estimate": {"POST": dry_runs.estimate},
    "/v1/routes/explain": {"POST": dry_runs.explain},
    "/v1/responses": {"POST": responses.create},
    "/v1/responses/input_tokens": {"POST": responses.input_tokens},
    "/v1/responses/{id}/input_items": {"GET": responses.input_items},
    "/v1/responses/{id}": {"GET": responses.retrieve, "DELETE": responses.delete},
    "/v1/files": {"POST": files.create, "GET": files.list_files},
    "/v1/files/{id}/content": {"GET": files.content},
    "/v1/files/{id}": {"GET": files.retrieve, "DELETE": files.delete},
    "/v1/batches": {"POST": batches.create, "GET": batches.list_batches},
    "/v1/batches/{id}/cancel": {"POST": batches.cancel},
    "/v1/batches/{id}": {"GET": batches.retrieve},
    "/v1/messages": {"POST": messages.create},
    "/v1/messages/count_tokens": {"POST": messages.count_tokens},
    "/v1/models": {"GET": inspect.models},
    "/v1/models/{id}": {"GET": inspect.model},
    "/tokenize": {"POST": tokens.tokenize},
    "/detokenize": {"POST": tokens.detokenize},
    "/docs": {"GET": inspect.docs},
    "/inspect": {"GET": inspect.page},
    "/inspect/live": {"GET": live.live},
    "/inspect/plan": {"GET": plan.fields, "POST": plan.plan},
    "/inspect/percentiles": {"GET": inspect_search.percentiles},
    "/inspect/usage": {"GET": own_usage.usage},
    "/inspect/requests": {"GET": inspect_search.requests},
    "/inspect/requests/{id}/explain": {"GET": inspect.explanation},
    "/inspect/requests/{id}/tokens": {"GET": inspect.tokens},
    "/inspect/requests/{id}": {"GET": inspect.request},
    "/inspect/state": {"GET": inspect.state},
    "/inspect/web/{id}": {"GET": inspect.page_file},
    "/metrics": {"GET": inspect.metrics},
    **ADMIN_ROUTES,
    "/admin/usage": {"GET": admin_books.usage},
    "/admin/ledger": {"GET": admin_books.ledger},
    "/admin/reconcile": {"GET": admin_books.reconcile},
    "/healthz": {"GET": inspect.healthz},
    "/readyz": {"GET": inspect.readyz},
}
"""Template to method to handler. What stands for the braces is the handler's `param`, slashes and all; of two templates
that fit, the upper one is meant. Who may use which: `policy.py`."""

ROUTES["/openapi.json"] = {"GET": openapi.telling(ROUTES)}


class Routes:
    """The ASGI application for HTTP. `app.py` wraps it with the lifespan."""

    def __init__(self, services: Services, request_ids: RequestIds | None = None) -> None:
        self._services = services
        self._request_ids = request_ids or RequestIds()

    def stop(self) -> None:
        """The server begins to stop: what lasts as long as somebody looks ends now."""
        self._services.stopping.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; refuse a WebSocket."""
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1003})
            return
        clock = self._services.clock
        started_at = clock.now()
        exchange = Exchange(scope, receive, send, services=self._services, request_ids=self._request_ids)
        try:
            await self._serve(exchange)
        except ClientGone as gone:
            exchange.status = exchange.status or gone.status
        except Exception as error:  # noqa: BLE001  # logged or told by `public`
            shown = public(error, exchange.request_id)
            if exchange.status is not None:
                return  # too late for a status; the connection, which owes the rest, is closed
            headers = error_headers(shown)
            if isinstance(shown, MethodNotAllowed):
                headers.append((b"allow", ", ".join(ROUTES[exchange.route]).encode()))
            body = (
                messages_errors.error_body(shown, exchange.request_id)
                if exchange.speaks_messages
                else error_body(shown)
            )
            await exchange.answer(shown.status, body, headers)
        finally:
            self._services.observe_http(exchange.route, exchange.status or 500, clock.now() - started_at)

    async def _serve(self, exchange: Exchange) -> None:
        services = self._services
        hosts = exchange.header_values(b"host")
        host = host_name(hosts, is_required=exchange.scope.get("http_version") != "1.0")
        exchange.route, exchange.param = match(exchange.path)
        if exchange.route not in OPEN_TO_ALL:
            check_host(host, services.server, are_keys_required=services.auth.are_keys_required)
            key, is_from_browser = presented_key(exchange)
            exchange.principal = services.auth.authenticate(key, exchange.client_host)
            if exchange.principal.is_anonymous:
                check_direct(exchange.headers)
            if exchange.principal.is_anonymous or is_from_browser:
                check_origin(exchange.header_values(b"origin"), hosts)
        handlers = ROUTES.get(exchange.route)
        if handlers is None:
            raise NotFound(f"no such route{_meant(exchange.path)}")
        handler = handlers.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            raise MethodNotAllowed(f"this route is for {', '.join(handlers)}")
        check_rights(exchange.principal, exchange.route)
        if idempotent.NAME in exchange.headers and exchange.route in idempotent.KEYED_ROUTES:
            await idempotent.once(exchange, services.idempotency, handler)
        else:
            await handler(exchange)


def _meant(path: str) -> str:
    """What base URLs with one part too few or too many turn into."""
    whole = "/" + path.strip("/")
    tried = (whole, f"/v1{whole}", whole.replace("//", "/"), whole.replace("/v1/v1/", "/v1/", 1))
    near = next((one for one in tried if one in ROUTES), None)
    return f"; did you mean {near}?" if near else ""


def match(path: str) -> tuple[str, str]:
    """The template that the path matches and what stands in its braces; `unmatched` when there is none."""
    if path in ROUTES:
        return path, ""
    for template in ROUTES:
        prefix, braces, suffix = template.partition("{id}")
        is_longer = len(path) > len(prefix) + len(suffix)
        if braces and is_longer and "\0" not in path and path.startswith(prefix) and path.endswith(suffix):
            return template, path[len(prefix) : len(path) - len(suffix)]
    return "unmatched", ""
