"""The inspector's page in a real browser, under the strict policy it is served with, fed with hostile text."""

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from hitsend.serve.api.openapi import document as openapi_document
from hitsend.serve.api.routes import ROUTES
from tests.architecture.tree import SRC
from tests.cli.sample import record, summary
from tests.inspect.chromium import Chromium, find

WEB = SRC / "inspect" / "web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
CORPUS = (
    "<img src=x onerror=\"document.title='owned'\">{{7*7}}",
    "<script>document.title='owned'</script>",
    "<svg onload=\"document.title='owned'\"></svg>",
    "<iframe srcdoc=\"<script>parent.document.title='owned'</script>\"></iframe>",
    "<a href=\"javascript:document.title='owned'\">x</a>",
    "javascript:document.title='owned'",
    '"><img src=x onerror="document.title=\'owned\'">',
    "'; document.title='owned'; //",
    "</textarea></script><script>document.title='owned'</script>",
    "<style>*{background:url(//evil.example/x)}</style>",
    "<link rel=stylesheet href=//evil.example/x.css><base href=//evil.example/>",
    "<math><mi//xlink:href=\"data:x,<script>document.title='owned'</script>\">",
    "${document.title='owned'} #{7*7} <%= 7*7 %>",
    "\u202e<b>evil</b>\u0000\ufeff",
    "<form action=//evil.example/><input name=key autofocus onfocus=\"document.title='owned'\">",
)
HOSTILE = "".join(CORPUS)

needs_chromium = pytest.mark.skipif(
    find() is None, reason="NO CHROMIUM, THE PAGE IS NOT TESTED: apt-get install chromium"
)
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")

FIELDS = {"temperature": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 2}, {"type": "null"}]}, HOSTILE: {}}


def hostile_course() -> list[dict[str, Any]]:
    """A request's way through a route whose every word is hostile."""
    one = {"name": HOSTILE, "model": HOSTILE, "engine": HOSTILE, "is_ready": False, "unable": HOSTILE}
    one |= {"cost_microusd": 1.5, "ttft_ms": 2.0, "num_observed": 3, "error_share": 0.5}
    turn = {"type": "routed", "at_ms": 4.0, "engine": HOSTILE, "model": HOSTILE, "reason": HOSTILE, "route": HOSTILE}
    judged = {"type": "judged", "at_ms": 4.0, "accepted": False, "verdicts": {HOSTILE: HOSTILE}, "mean_logprob": -1.5}
    gone = {"type": "abandoned", "at_ms": 5.0, "code": HOSTILE, "message": HOSTILE}
    return [
        turn | {"attempt": 1, "candidates": [one]},
        {"type": "sent", "at_ms": 4.0, "attempt": 1},
        {"type": "answered", "at_ms": 4.0, "status": 503, "reason": HOSTILE, "will_retry": True},
        judged | {"judge_microusd": 3},
        gone | {"cost_microusd": 1, "billed_microusd": 0},
        turn | {"attempt": 2, "candidates": []},
        {"type": "shadowed", "at_ms": 6.0, "model": HOSTILE, "request_id": HOSTILE},
    ]


def hostile_record() -> dict[str, Any]:
    known = record(request_id="req/2?", model=HOSTILE, error={"code": HOSTILE, "message": HOSTILE, "param": None})
    scored = [{"token": each, "logprob": -0.5, "top": [{"token": each, "logprob": -0.7}]} for each in CORPUS]
    known |= {"output_text": {"0": HOSTILE}, "output_reasoning": {"0": HOSTILE}, "output_tokens": {"0": scored}}
    known |= {"output_tool_calls": {"0": [{"id": "c", "name": HOSTILE, "arguments": HOSTILE}]}}
    spans = [{"message": 0, "role": HOSTILE, "start": 0, "end": 3}]
    known["events"] += [
        {"type": "rendered", "at_ms": 1.0, "num_chars": 9, "text": HOSTILE},
        {"type": "tokenized", "at_ms": 2.0, "num_tokens": 3, "num_control_tokens": 1, "spans": spans},
        {"type": "stop_matched", "at_ms": 3.0, "choice": 0, "stop": HOSTILE, "num_tokens": 4},
        {"type": "held", "at_ms": 3.0, "choice": 0, "num_bytes": 4, "reason": HOSTILE},
        {"type": HOSTILE, "at_ms": 4.0, HOSTILE: HOSTILE},
        *hostile_course(),
    ]
    return known


class Stub:
    """The server's side of the page. Whatever is text in an answer of it is hostile."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.is_caller = False
        self.api: dict[str, Any] = {"components": {"schemas": {"ChatBody": {"properties": FIELDS}}}}
        self.records = {"req-1": record(), "req/2?": hostile_record()}
        self.url = ""

    async def file(self, request):
        name = request.match_info.get("name", "index.html")
        return web.FileResponse(WEB / name, headers={"content-security-policy": POLICY})

    async def list(self, request):
        lines = [summary(known) | {"ttft_ms": 40.0} for known in self.records.values()]
        lines[1]["name"] = HOSTILE
        return self.answer(request, requests=lines, next_before=None)

    async def percentiles(self, request):
        ranks = [{"share": share, "ms": 40.0, "request_id": "req/2?"} for share in (50, 99)]
        return self.answer(request, num_requests=2, wall=ranks, ttft=ranks)

    async def record(self, request):
        known = self.records.get(request.match_info["id"]) or hostile_record()
        return self.answer(request, **known)

    async def explain(self, request):
        cause = {"name": "edge", "ms": 100.0, "share": 1.0, "text": HOSTILE}
        change = {"name": HOSTILE, "saved_ms": 1.0, "saved_microusd": 2, "basis": HOSTILE}
        cost = [{"kind": HOSTILE, "num_tokens": 3, "microusd": 4}]
        return self.answer(request, causes=[cause], largest="edge", changes=[change], cost=cost, cache=HOSTILE)

    async def tokens(self, request):
        shown = [{"id": 1, "text": each, "is_control": False} for each in CORPUS]
        return self.answer(request, is_captured=True, prompt=shown)

    async def usage(self, request):
        totals = dict.fromkeys(("requests", "prompt_tokens", "cached_tokens", "completion_tokens"), 3)
        totals["cost_microusd"] = 9
        kinds = [{"kind": HOSTILE, "num_tokens": 3, "cost_microusd": 9}]
        budget = {"level": HOSTILE, "name": "usd_per_day", "since": HOSTILE}
        budget |= {"limit_microusd": 5, "spent_microusd": 2, "left_microusd": 3}
        parts = [{"of": {"day": HOSTILE}, "totals": totals, "kinds": kinds}]
        return self.answer(request, by="day", parts=parts, totals=totals, kinds=kinds, budgets=[budget])

    async def live(self, request):
        shown = {"request_id": HOSTILE, "name": HOSTILE, "model": HOSTILE, "state": HOSTILE, "age_ms": 5.0}
        shown |= {"prompt_tokens": 9, "prefilled_tokens": 9, "output_tokens": 2, "max_tokens": 9, "ttft_ms": 1.0}
        counts = {"running": 1, "waiting": 2, "cells_total": 100, "cells_used": 40, "cells_cached": 0, "holds_open": 1}
        state = counts | {"engine": {"pid": 4711, "model": HOSTILE, "restarts": 0}}
        step = dict.fromkeys(("step", "batch_prefill_tokens", "batch_decode_tokens", "batch_sequences"), 1)
        members = [{"request_id": HOSTILE, "prefill_tokens": 0, "decode_tokens": 1}]
        frame = {"pid": 1, "num_requests": 1, "num_waiting": 0, "prompt_tokens_per_s": 1.0, "output_tokens_per_s": 2.0}
        frame |= {"step": step | {"ms": 2.0, "members": members}, "requests": [shown]}
        frame["state"] = None if self.is_caller else state
        return await self.stream(request, frame, stays=True)

    async def chat(self, request):
        deltas = [{"role": "assistant", "content": ""}, *({"content": each} for each in CORPUS)]
        deltas += [{"reasoning_content": HOSTILE}]
        deltas += [{"tool_calls": [{"index": 0, "id": "c", "function": {"name": HOSTILE, "arguments": HOSTILE}}]}]
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": HOSTILE}]}]
        return await self.stream(request, *chunks)

    async def stream(self, request, *documents, stays=False):
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for document in documents:
            await answer.write(f"data: {json.dumps(document)}\n\n".encode())
        while stays and request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.05)
        return answer

    async def models(self, request):
        return self.answer(request, data=[{"id": HOSTILE}])

    async def openapi(self, request):
        return self.answer(request, **self.api)

    def answer(self, request, **document):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"code": "invalid_api_key", "message": "no key"}}, status=401)
        return web.json_response(document)


@pytest.fixture
async def stub():
    stub = Stub()
    app = web.Application()
    for path, handler in {
        "/": stub.file,
        "/inspect": stub.file,
        "/inspect/web/{name}": stub.file,
        "/inspect/requests": stub.list,
        "/inspect/percentiles": stub.percentiles,
        "/inspect/requests/{id}/explain": stub.explain,
        "/inspect/requests/{id}/tokens": stub.tokens,
        "/inspect/requests/{id}": stub.record,
        "/inspect/usage": stub.usage,
        "/inspect/live": stub.live,
        "/v1/models": stub.models,
        "/openapi.json": stub.openapi,
    }.items():
        app.router.add_get(path, handler)
    app.router.add_post("/v1/chat/completions", stub.chat)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


@pytest.fixture
async def page(tmp_path):
    browser = Chromium(tmp_path)
    try:
        async with aiohttp.ClientSession() as session:
            page = await browser.page(session)
            yield page
            await page.close()
    finally:
        browser.close()


async def go(page, view, ready):
    await page.run(f"location.hash = {json.dumps(view)}")
    await page.until(f"!!({ready})")


@needs_chromium
@pytest.mark.slow
async def test_text_stays_text_in_every_view(stub, page):
    await page.open(f"{stub.url}/")
    await page.until("document.querySelectorAll('#ask-fields input').length === 2")
    await page.run(f"document.querySelector('#ask-text').value = {json.dumps(HOSTILE)}")
    await page.run("document.querySelector('#ask-send').click()")
    await page.until("!!document.querySelector('#talk .ended')")
    shown = await page.run("document.querySelector('#talk').textContent")
    assert all(each in shown for each in CORPUS if "\u0000" not in each)
    await go(page, "#/live", "document.querySelector('#live-requests tbody tr')")
    await go(page, "#/requests", "document.querySelectorAll('#requests tbody tr').length === 2")
    await go(page, f"#/request/{'req%2F2%3F'}", "document.querySelectorAll('#record .token').length === 30")
    shown = await page.run("document.querySelector('#record').textContent")
    assert all(each in shown for each in CORPUS if "\u0000" not in each)
    await go(page, "#/compare/req-1/req%2F2%3F", "document.querySelectorAll('#compared .segments').length === 2")
    await go(page, "#/money", "document.querySelector('#spent table')")
    await go(page, f"#/requests?name={'%3Cimg%20src=x%3E'}", "document.querySelector('#f-name').value")
    assert await page.run("document.title") == "hitsend"
    strange = "img, script:not([src^='/inspect/web/']), iframe, base, math, style, svg[onload], [onerror], [onfocus]"
    assert await page.run(f"document.querySelectorAll({json.dumps(strange)}).length") == 0
    assert await page.run("[...document.links].every((one) => one.protocol === 'http:')")
    assert page.problems == []
    assert [url for url in page.requested if not url.startswith((stub.url, "data:"))] == []


@needs_chromium
@pytest.mark.slow
async def test_the_docs_draw_every_route_and_body_of_the_real_document(stub, page):
    stub.api = msgspec.to_builtins(openapi_document(ROUTES))
    await page.open(f"{stub.url}/inspect/web/docs.html")
    await page.until("document.querySelector('#status').textContent.startsWith('version')")
    operations = [item for methods in stub.api["paths"].values() for item in methods.values() if "responses" in item]
    assert await page.run("document.querySelectorAll('#docs details').length") == len(operations)
    assert await page.run("document.querySelectorAll('#docs h3').length") == len(stub.api["components"]["schemas"])
    shown = await page.run("document.querySelector('#docs').textContent")
    assert all(f"Body, {kind}" in shown for kind in ("application/json", "multipart/form-data"))
    assert page.problems == []


@needs_chromium
@pytest.mark.slow
async def test_the_page_shows_a_request_by_keyboard(stub, page):
    stub.records["req/2?"] = record(request_id="req/2?")
    await page.open(f"{stub.url}/inspect")
    await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
    for _ in range(40):  # Tab until the first request has the focus
        if await page.run("document.activeElement?.textContent === 'req-1'"):
            break
        await page.press("Tab", 9)
    await page.press("Enter", 13)
    await page.until("!document.querySelector('#record').hidden")
    assert await page.run("document.activeElement.id") == "detail-title"
    shown = await page.run("document.querySelector('#view-request').innerText")
    for part in ("req-1", "prefill own", "30.0 ms", "60.0 %", "300 tokens", "20 from the cache", "1,024"):
        assert part in shown
    assert await page.run("document.querySelectorAll('.segments rect:not(.axis)').length") == 5


@needs_chromium
@pytest.mark.slow
async def test_the_page_asks_for_a_key_where_one_is_needed_and_keeps_it_in_the_tab(stub, page):
    stub.key = "sk-1"
    stub.is_caller = True
    await page.open(f"{stub.url}/inspect")
    await page.until("!document.querySelector('#key-form').hidden")
    await page.run("document.querySelector('#key').value = 'sk-1'; document.querySelector('#key-form button').click()")
    await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
    assert await page.run("document.querySelector('#key-form').hidden")
    assert await page.run("localStorage.length") == 0
    assert "sk-1" not in await page.run("document.documentElement.outerHTML + location.href + document.cookie")
    await go(page, "#/live", "document.querySelector('#live-requests tbody tr')")
    assert "not shown" in await page.run("document.querySelector('#live-state').textContent")


def test_the_page_is_whole_without_anything_from_elsewhere():
    texts = {path.name: path.read_text("utf-8") for path in WEB.iterdir()}
    modules = (
        "api",
        "ask",
        "compare",
        "dom",
        "live",
        "money",
        "page",
        "plan",
        "record",
        "route",
        "search",
        "tokens",
        "waterfall",
    )
    pages = {"index.html", "page.css", "views.css", "docs.html", "docs.js", "docs.css"}
    assert set(texts) == {*pages, *(f"{name}.js" for name in modules)}
    for name, text in texts.items():
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text, name
        assert "style=" not in text, name
        assert len(text.splitlines()) <= 400, name
    assert "<script>" not in texts["index.html"]
