"""The inspector's page in a real browser, under the strict policy it is served with, fed with hostile text."""

import aiohttp
import pytest
from aiohttp import web

from tests.architecture.tree import SRC
from tests.cli.sample import record, summary
from tests.inspect.chromium import Chromium, find

WEB = SRC / "inspect" / "web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HOSTILE = "<img src=x onerror=\"document.title='owned'\">{{7*7}}"

needs_chromium = pytest.mark.skipif(
    find() is None, reason="NO CHROMIUM, THE PAGE IS NOT TESTED: apt-get install chromium"
)
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")


class Stub:
    """The server's side of the page."""

    def __init__(self):
        self.key = None
        self.is_caller = False
        self.records = {"req-1": record(), "req/2?": record(request_id="req/2?", model=HOSTILE, error=None)}
        self.url = ""

    async def file(self, request):
        name = request.match_info.get("name", "index.html")
        return web.FileResponse(WEB / name, headers={"content-security-policy": POLICY})

    async def state(self, request):
        if self.is_caller:
            return web.json_response({"error": {"code": "permission_denied"}}, status=403)
        engine = {"pid": 4711, "model": HOSTILE, "restarts": 0}
        counts = {"running": 1, "waiting": 2, "slots_used": 1, "holds_open": 1}
        cells = {"cells_total": 100, "cells_used": 40, "cells_cached": 0}
        return self.answer(request, **counts, **cells, engine=engine)

    async def list(self, request):
        return self.answer(request, requests=[summary(known) for known in self.records.values()])

    async def record(self, request):
        return self.answer(request, **self.records[request.match_info["id"]])

    def answer(self, request, **document):
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"code": "invalid_api_key"}}, status=401)
        return web.json_response(document)


@pytest.fixture
async def stub():
    stub = Stub()
    app = web.Application()
    app.router.add_get("/inspect", stub.file)
    app.router.add_get("/inspect/web/{name}", stub.file)
    app.router.add_get("/inspect/state", stub.state)
    app.router.add_get("/inspect/requests", stub.list)
    app.router.add_get("/inspect/requests/{id}", stub.record)
    runner = web.AppRunner(app)
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


@needs_chromium
@pytest.mark.slow
async def test_the_page_shows_a_request_by_keyboard_and_text_stays_text(stub, page):
    await page.open(f"{stub.url}/inspect")
    await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
    assert "40/100" in await page.run("document.querySelector('#state').textContent")
    for _ in range(10):  # Tab until the first request has the focus
        if await page.run("document.activeElement?.textContent === 'req-1'"):
            break
        await page.press("Tab", 9)
    await page.press("Enter", 13)
    await page.until("!document.querySelector('#record').hidden")
    shown = await page.run("document.querySelector('#detail').innerText")
    for part in (
        "req-1",
        "prefill own",
        "30.0 ms",
        "60.0 %",
        "300 tokens (20 cached)",
        "$0.001735",
        "first token",
        "1/1024",
    ):
        assert part in shown
    assert await page.run("document.querySelectorAll('#segments rect').length") == 5
    await page.run("location.hash = encodeURIComponent('req/2?')")
    await page.until("document.querySelector('#detail-title').textContent === 'req/2?'")
    assert "onerror" in await page.run("document.querySelector('#facts').textContent")
    assert await page.run("document.querySelectorAll('img').length") == 0
    assert await page.run("document.title") == "hitsend · inspect"
    assert page.problems == []
    assert [url for url in page.requested if not url.startswith((stub.url, "data:"))] == []


@needs_chromium
@pytest.mark.slow
async def test_the_page_fits_any_width_and_can_be_read_in_light_and_dark(stub, page):
    contrast = """(() => {
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255)
          .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const paper = light(getComputedStyle(document.body).backgroundColor);
      const texts = ['body', '#facts', 'th', '#requests a', 'h3', 'dt', '#events td:last-child'];
      return Math.min(...texts.map((found) => {
        const ink = light(getComputedStyle(document.querySelector(found)).color);
        return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
      }));
    })()"""
    await page.open(f"{stub.url}/inspect#req-1")
    await page.until("!document.querySelector('#record').hidden")
    papers = set()
    for scheme in ("light", "dark"):
        await page.scheme(scheme)
        papers.add(await page.run("getComputedStyle(document.body).backgroundColor"))
        assert await page.run(contrast) >= 4.5
    assert len(papers) == 2
    for width in (320, 390, 800, 1440, 2560):
        await page.resize(width)
        assert await page.run("document.scrollingElement.scrollWidth <= innerWidth"), width
    assert page.problems == []


@needs_chromium
@pytest.mark.slow
async def test_the_page_asks_for_a_key_where_one_is_needed_and_keeps_it_in_the_tab(stub, page):
    stub.key = "sk-1"
    await page.open(f"{stub.url}/inspect")
    await page.until("!document.querySelector('#key-form').hidden")
    await page.run("document.querySelector('#key').value = 'sk-1'; document.querySelector('#key-form button').click()")
    await page.until("document.querySelector('#status').textContent === 'live'")
    assert await page.run("document.querySelector('#key-form').hidden")
    assert await page.run("localStorage.length") == 0
    assert "sk-1" not in await page.run("document.documentElement.outerHTML + location.href + document.cookie")


@needs_chromium
@pytest.mark.slow
async def test_a_key_that_may_not_see_the_server_s_state_still_sees_its_own_requests(stub, page):
    stub.is_caller = True
    await page.open(f"{stub.url}/inspect")
    await page.until("document.querySelectorAll('#requests tbody tr').length === 2")
    await page.until("document.querySelector('#status').textContent === 'live'")
    assert "not shown" in await page.run("document.querySelector('#state').textContent")
    assert await page.run("document.querySelector('#key-form').hidden")


def test_the_page_is_whole_without_anything_from_elsewhere():
    texts = {path.name: path.read_text("utf-8") for path in WEB.iterdir()}
    assert set(texts) == {"index.html", "page.js", "page.css", "docs.html", "docs.js", "docs.css"}
    for name, text in texts.items():
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text, name
        assert "style=" not in text, name
    assert "<script>" not in texts["index.html"]
