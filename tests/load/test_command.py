"""`hitsend load` as a process: one document or one summary, files, and what Ctrl-C leaves."""

import asyncio
import csv
import io
import json
import os
import signal
import sys

import aiohttp
import pytest

from hitsend.load.document import document
from hitsend.load.page import page
from hitsend.load.report import Slo
from hitsend.load.rows import COLUMNS, write_rows
from hitsend.load.run import run
from hitsend.load.target import Target
from hitsend.plan.calibrate import read_points
from tests.inspect.chromium import Chromium, find
from tests.load.scripted import Quiet, fail_midway, scripted
from tests.load.test_run import plan

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


async def hitsend(*words, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    pipe = asyncio.subprocess.PIPE
    command = ("-m", "hitsend", "load", *words)
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, env=clean | environment, stdout=pipe, stderr=pipe
    )


async def test_one_document_on_stdout_and_the_files_that_were_asked_for(tmp_path):
    files = ("--csv", str(tmp_path / "rows.csv"), "--html", str(tmp_path / "page.html"))
    shape = ("--input", "30", "--output", "4", "--requests", "5", "--concurrency", "1,2", "--slo-ttft", "60s")
    async with scripted() as server:
        ran = await hitsend("--url", server.url, *shape, *files, "--json", "--seed", "3")
        out, err = await ran.communicate()
    assert ran.returncode == 0, err.decode()
    found = json.loads(out)
    assert [level["requests"]["ok"] for level in found["targets"][0]["levels"]] == [5, 5]
    assert [level["goodput_share"] for level in found["targets"][0]["levels"]] == [1, 1]
    assert found["settings"]["seed"] == 3
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text("utf-8"))))
    assert [row["output_tokens"] for row in rows] == ["4"] * 10
    assert "</html>" in (tmp_path / "page.html").read_text("utf-8")
    assert "Traceback" not in err.decode()
    # and `hitsend plan speed --calibrate` takes it
    for level in found["targets"][0]["levels"]:
        # a scripted answer may come in one piece, with no time between its tokens
        level["tpot_ms"]["p50"], level["ttft_ms"]["p50"], level["is_growing"] = 3.5, 20.5, False
    (tmp_path / "load.json").write_text(json.dumps(found))
    points = read_points(tmp_path / "load.json")
    assert [(point.output, point.tpot_ms, point.ttft_ms) for point in points] == [(4, 3.5, 20.5)] * 2


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
async def test_an_interruption_shows_what_was_measured_so_far(by):
    async with scripted() as server:
        ran = await hitsend("--url", server.url, "--input", "30", "--output", "4", "--duration", "600")
        async with asyncio.timeout(60):
            while len(server.chats) < 12:
                await asyncio.sleep(0.02)
        ran.send_signal(by)
        out, err = await ran.communicate()
    assert ran.returncode == 130, err.decode()
    text = out.decode()
    assert "interrupted: the last level is incomplete" in text
    for name in ("TTFT", "TPOT", "ITL", "E2E", "tok/s"):
        assert name in text
    assert "Traceback" not in err.decode()


async def test_what_cannot_be_written_or_is_said_twice_is_refused_before_anything_is_sent(tmp_path):
    async with scripted() as server:
        there = ("--url", server.url)
        for words in (
            (*there, "--html", str(tmp_path)),
            (*there, "--csv", str(tmp_path / "no" / "rows")),
            (*there, "--target", f"a={server.url}"),
        ):
            ran = await hitsend(*words)
            _, err = await ran.communicate()
            assert (ran.returncode, len(err.decode().splitlines())) == (2, 1), err.decode()
        assert server.mock.calls == []


async def test_a_terminal_that_lacks_the_bars_gets_the_figures():
    async with scripted() as server:
        words = ("--url", server.url, "--input", "30", "--output", "4", "--requests", "3", "--concurrency", "1")
        ran = await hitsend(*words, PYTHONIOENCODING="ascii", COLUMNS="30")
        out, err = await ran.communicate()
    assert ran.returncode == 0, err.decode()
    assert "out tok/s" in out.decode("ascii")
    assert "TTFT" in out.decode("ascii")


async def test_what_was_measured_is_not_lost_to_a_place_without_room(tmp_path):
    """A full disk (`/dev/full`), and a reader of stdout who has left."""
    rows, shown = tmp_path / "rows.csv", tmp_path / "page.html"
    async with scripted() as server:
        words = ("--url", server.url, "--input", "30", "--output", "4", "--requests", "3", "--concurrency", "1")
        ran = await hitsend(*words, "--csv", "/dev/full", "--html", str(shown))
        out, err = await ran.communicate()
        assert (ran.returncode, "out tok/s" in out.decode(), "</html>" in shown.read_text("utf-8")) == (2, True, True)
        assert err.decode().splitlines()[-1] == "hitsend: /dev/full can't be written: No space left on device"
        ran = await hitsend(*words, "--csv", str(rows))
        ran._transport.get_pipe_transport(1).close()
        _, err = await ran.communicate()
    assert (ran.returncode, len(rows.read_text("utf-8").splitlines())) == (1, 4), err.decode()


async def hostile_run():
    async with scripted() as server:
        server.scripts = {1: fail_midway}
        targets = (Target(HOSTILE, server.url),)
        return await run(plan(server, targets=targets, concurrency=(1, 2), slo=Slo(ttft_ms=60_000)), Quiet())


async def test_the_page_is_whole_in_itself_and_escapes_everything():
    done = await hostile_run()
    text = page(done, document(done, note=HOSTILE))
    assert "<img" not in text
    assert "<script" not in text
    assert text.count("<svg") == text.count("</svg>") >= 8
    assert "http" not in text.replace(done.targets[0].target.url, "").replace("http-equiv", "").replace("http_", "")
    assert "default-src &#x27;none&#x27;" in text
    rows = io.StringIO()
    write_rows(done, rows)
    assert len(rows.getvalue().splitlines()) == 1 + 16


async def test_a_spreadsheet_calculates_nothing():
    async with scripted() as server:
        done = await run(plan(server, targets=(Target("=1+1", server.url),), requests=1), Quiet())
    rows = io.StringIO()
    write_rows(done, rows)
    head, row = csv.reader(io.StringIO(rows.getvalue()))
    assert tuple(head) == COLUMNS
    assert row[0] == "'=1+1"


@pytest.mark.slow
@pytest.mark.skipif(find() is None, reason="NO CHROMIUM, THE PAGE IS NOT TESTED: apt-get install chromium")
async def test_the_page_in_a_browser(tmp_path):
    done = await hostile_run()
    file = tmp_path / "page.html"
    file.write_text(page(done, document(done, note=HOSTILE)), encoding="utf-8")
    browser = Chromium(tmp_path / "profile")
    try:
        async with aiohttp.ClientSession() as session:
            tab = await browser.page(session)
            await tab.open(file.as_uri())
            light = await tab.run("getComputedStyle(document.body).backgroundColor")
            await tab.scheme("dark")
            assert await tab.run("getComputedStyle(document.body).backgroundColor") != light
            for width in (360, 1440):
                await tab.resize(width)
                assert await tab.run("document.documentElement.scrollWidth") <= width
            assert await tab.run("document.title") == f"hitsend load: {HOSTILE}"
            assert await tab.run("document.images.length") == 0
            assert await tab.run("document.querySelectorAll('svg').length") >= 8
            assert tab.requested == [file.as_uri()]
            assert tab.problems == []
            await tab.close()
    finally:
        browser.close()
