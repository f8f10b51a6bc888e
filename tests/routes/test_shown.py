"""A request's way through a route, where people look: in the terminal and on the page."""

import asyncio
import io
import json

import aiohttp
import pytest
from rich.console import Console

from hitsend import settings
from hitsend.cli.waterfall import draw
from tests.inspect.chromium import Chromium, find
from tests.routes.test_routed import fails, says

pytestmark = pytest.mark.slow  # a server, and a browser where there is one

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
PARTS = (
    "rejected: no match",
    "given up",
    "503 engine_unavailable, asked again",
    "$0.000013",
    "answered",
)


def drawn(document):
    console = Console(file=io.StringIO(), width=400, color_system=None)
    console.print(draw(document))
    return console.file.getvalue()


@pytest.fixture
async def record(routed):
    """Of a cascade: a draft rejected, an engine that fails twice, one that answers; and of that server its address."""
    cascade = settings.CascadeSettings(regex="never")
    async with routed(
        num=3, strategy="cascade", cascade=cascade, shadow="c", of_engine={"b": {"retry_share": 1.0}}
    ) as gate:
        gate.a.script = says(HOSTILE)
        gate.b.script = fails("503 no")
        status, _, found = await gate.asked("r1")
        assert status == 200
        yield gate.url, found


async def test_the_terminal_shows_it(record):
    text = drawn(record[1])
    for part in PARTS:
        assert part in text, part
    for part in (
        "route    auto: a first",
        "- c can: at most $",
        "1. a on engine-a",
        "sent 2 times",
        "copy to c: as r1/shadow",
    ):
        assert part in text, part
    assert "route" not in drawn(record[1] | {"events": []})


@pytest.mark.skipif(find() is None, reason="NO CHROMIUM, THE PAGE IS NOT TESTED: apt-get install chromium")
async def test_the_page_shows_it_and_takes_nothing_of_it_for_markup(record, tmp_path):
    url, known = record
    browser = await asyncio.to_thread(Chromium, tmp_path)
    try:
        async with aiohttp.ClientSession() as session:
            page = await browser.page(session)
            await page.open(f"{url}/inspect#/request/r1")
            await page.until("document.querySelectorAll('#record .part').length > 5")
            titles = await page.run("[...document.querySelectorAll('#record h3')].map((one) => one.textContent)")
            assert titles[:2] == ["Where the time went", "Route"]
            text = await page.run("document.querySelectorAll('#record .part')[1].innerText")
            for part in (*PARTS, "a first; what is rejected goes on to b, c", "1", "3", "r1/shadow"):
                assert part in text, part
            bodies = "[...document.querySelectorAll('#record .part')[1].querySelectorAll('tbody')]"
            rows = await page.run(f"{bodies}.map((one) => one.rows.length)")
            judged = sum(event["type"] == "judged" for event in known["events"])
            assert rows == [3, 3 + judged]
            assert await page.run("document.title") != "owned"
            assert [one for one in page.problems if "Content Security" in json.dumps(one)] == []
            await page.close()
    finally:
        await asyncio.to_thread(browser.close)
