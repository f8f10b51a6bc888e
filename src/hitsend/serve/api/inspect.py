"""Looking at the server: one flight record, its state, its page, its models, its health.

Enters: GET requests. Leaves: JSON, Prometheus' text, the page's files. Always true: a caller sees the records of its
own key and no others, unless its role sees all; an unknown record and a foreign one are the same 404; `/healthz` says
nothing but whether the engine makes progress, since it is the one route without a key. Next: `inspect_search.py`.
"""

import base64
import contextlib
import hashlib
import re
from importlib.resources import files
from typing import Any

import msgspec

from hitsend.core.errors import EngineUnavailable, NotFound
from hitsend.core.vocabulary import Vocabulary
from hitsend.inspect.explain import explain
from hitsend.serve.access.rights import check_model, may_use
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.policy import sees_all
from hitsend.serve.api.services import PageFile, ServedModel

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class _Owner(msgspec.Struct, frozen=True):
    key_id: str | None = None


class _Owned(msgspec.Struct, frozen=True):
    principal: _Owner = _Owner()


class _Prompt(msgspec.Struct, frozen=True):
    prompt_token_ids: tuple[int, ...] | None = None


class _Prompted(msgspec.Struct, frozen=True):
    model: str | None = None
    events: tuple[_Prompt, ...] = ()
    output_token_ids: dict[str, tuple[int, ...]] = {}


def load_page() -> dict[str, PageFile]:
    """The page's files by name, read once; nothing else of the disk is served. Empty where they aren't installed."""
    folder = files("hitsend") / "inspect" / "web"
    if not folder.is_dir():
        return {}
    found = {}
    for entry in folder.iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            found[entry.name] = PageFile(_TYPES[suffix], entry.read_bytes())
    return found


async def page(exchange: Exchange) -> None:
    """The inspector's page, at `/` and `/inspect`."""
    await _send_file(exchange, "index.html")


async def docs(exchange: Exchange) -> None:
    """The page that draws `/openapi.json`."""
    await _send_file(exchange, "docs.html")


async def page_file(exchange: Exchange) -> None:
    """A script or style of the page."""
    await _send_file(exchange, exchange.param)


async def request(exchange: Exchange) -> None:
    """One flight record. Raises NotFound."""
    await exchange.answer(200, await _record(exchange), [(b"content-type", b"application/json")])


async def _record(exchange: Exchange) -> bytes:
    record = await exchange.services.records.get(exchange.param)
    if record is None or not (sees_all(exchange.principal) or _owner(record) == exchange.principal.key_id):
        raise NotFound("no record of that request")
    return record


async def explanation(exchange: Exchange) -> None:
    """Where one request's time and money went, and what would have changed it. Raises NotFound."""
    record = msgspec.json.decode(await _record(exchange))
    await exchange.answer_json(explain(record))


async def tokens(exchange: Exchange) -> None:
    """The tokens of prompt and answers one by one, where ids were captured by the model that runs here. Raises
    NotFound."""
    record = msgspec.json.decode(await _record(exchange), type=_Prompted)
    ids = next((event.prompt_token_ids for event in record.events if event.prompt_token_ids is not None), None)
    is_served = record.model in {model.id for model in exchange.services.models()}
    table: Vocabulary | None = None
    if record.model is not None and is_served:
        with contextlib.suppress(EngineUnavailable):  # a model that isn't loaded at the moment
            table = exchange.services.text.vocabulary_of(record.model)
    if ids is None or table is None:
        await exchange.answer_json({"is_captured": False, "prompt": [], "answers": {}})
        return
    answers = {choice: _spelled(table, said) for choice, said in record.output_token_ids.items()}
    await exchange.answer_json({"is_captured": True, "prompt": _spelled(table, ids), "answers": answers})


def _spelled(table: Vocabulary, ids: tuple[int, ...]) -> list[dict[str, Any]]:
    known = (token_id for token_id in ids if token_id < table.size)
    return [{"id": one, "text": table.spelling(one), "is_control": one in table.control_ids} for one in known]


async def state(exchange: Exchange) -> None:
    """The server's figures of this moment."""
    await exchange.services.gather("state")
    await exchange.answer_json(exchange.services.state())


async def models(exchange: Exchange) -> None:
    """All served models that the caller may use."""
    usable = [_model(exchange, model) for model in _served(exchange) if may_use(exchange.principal, model.id)]
    await exchange.answer_json({"object": "list", "data": usable})


async def model(exchange: Exchange) -> None:
    """One served model. Raises ModelNotFound."""
    served = {model.id: model for model in _served(exchange)}
    check_model(exchange.principal, exchange.param, served)
    await exchange.answer_json(_model(exchange, served[exchange.param]))


def _served(exchange: Exchange) -> tuple[ServedModel, ...]:
    """Models that chat, and those that embed."""
    services = exchange.services
    embedding = () if services.embedding_model is None else (services.embedding_model,)
    return (*services.models(), *embedding, *services.embedding_models_elsewhere)


async def metrics(exchange: Exchange) -> None:
    """Prometheus' text; with exemplars for whoever accepts OpenMetrics."""
    is_openmetrics = b"application/openmetrics-text" in exchange.headers.get(b"accept", b"")
    await exchange.services.gather("openmetrics" if is_openmetrics else "metrics")
    content_type, body = exchange.services.render_metrics(is_openmetrics)
    await exchange.answer(200, body, [(b"content-type", content_type.encode())])


async def healthz(exchange: Exchange) -> None:
    """200 while the engine makes progress or has nothing to do, else 503."""
    health = exchange.services.health()
    status = "ok" if health.is_healthy else "stalled"
    await exchange.answer_json({"status": status}, status=200 if health.is_healthy else 503)


async def readyz(exchange: Exchange) -> None:
    """200 when a request sent now would be served, else 503 and why."""
    health = exchange.services.health()
    shown = {"status": "ready" if health.is_ready else "not ready", "detail": health.detail}
    await exchange.answer_json(shown, status=200 if health.is_ready else 503)


def _owner(record: bytes) -> str | None:
    return msgspec.json.decode(record, type=_Owned).principal.key_id


def _model(exchange: Exchange, served: ServedModel) -> dict[str, Any]:
    state = exchange.services.model_state(served.id)
    return {
        "id": served.id,
        "object": "model",
        "created": served.created,
        "owned_by": served.owned_by,
        "max_model_len": served.context,
        **({"hitsend": state} if state else {}),
    }


async def _send_file(exchange: Exchange, name: str) -> None:
    found = exchange.services.page.get(name)
    if found is None:
        raise NotFound("no such page")
    headers = [
        (b"content-type", found.content_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"content-security-policy", _policy(found.body).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    await exchange.answer(200, found.body, headers)


def _policy(html: bytes) -> str:
    """What the page may load: this server's own files, and the inline code it came with, by hash."""
    hashes = {"script": "", "style": ""}
    for kind, code in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(code).digest()).decode()
        hashes[kind.decode()] += f" 'sha256-{digest}'"
    return (
        f"default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self'{hashes['script']}; "
        f"style-src 'self'{hashes['style']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
