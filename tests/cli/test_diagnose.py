"""`hitsend diagnose` as a process, and what it says when it can't."""

import asyncio
import io
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from hitsend.cli import CallFailed
from hitsend.cli.diagnose import _look, _saved, metrics_url, parsed, seconds_of, shown
from hitsend.core.errors import ConfigError
from hitsend.inspect.baseline import baseline_of
from hitsend.inspect.diagnose import diagnose
from hitsend.inspect.readings import Figures
from hitsend.load.document import document
from hitsend.load.report import Slo
from hitsend.load.run import run
from tests.inspect.induced import BETWEEN
from tests.load.scripted import Quiet, scripted
from tests.load.test_run import plan
from tests.served import free_port

RECORDED = Path(__file__).parents[1] / "inspect/recorded"
QUEUE = (RECORDED / "vllm-queue.txt").read_text().split(BETWEEN)


async def hitsend(*words):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    pipe = asyncio.subprocess.PIPE
    command = ("-m", "hitsend", "diagnose", *words)
    ran = await asyncio.create_subprocess_exec(sys.executable, *command, env=clean, stdout=pipe, stderr=pipe)
    out, err = await ran.communicate()
    assert b"Traceback" not in err
    return ran.returncode, out.decode(), err.decode()


@asynccontextmanager
async def answering(*texts, status=200):
    """A server whose /metrics are these texts, one after the other, the last one for good."""
    asked = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        text = texts[min(len(asked), len(texts) - 1)].encode()
        asked.append(head.split(b"\r\n")[0].decode())
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (status, len(text)) + text)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()


async def test_another_server_is_looked_at_by_its_url():
    async with answering(*QUEUE) as (url, asked):
        status, out, err = await hitsend("--url", f"{url}/v1", "--window", "200ms", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["server"], found["verdict"]) == ("vllm", "queue_bound")
    assert found["window_s"] >= 0.2
    assert set(asked) == {"GET /metrics HTTP/1.1"}
    assert len(asked) >= 2
    (evidence,) = [each for each in found["findings"][0]["evidence"] if each["name"] == "waiting"]
    assert (evidence["relation"], evidence["threshold"], evidence["source"]) == (">=", 1.0, "default")


async def test_two_saved_looks_are_a_window(tmp_path):
    for name, text in zip(("a", "b"), QUEUE, strict=True):
        (tmp_path / name).write_text(text)
    saved = ("--from", str(tmp_path / "a"), "--to", str(tmp_path / "b"), "--window", "10s")
    status, out, err = await hitsend(*saved)
    assert (status, err) == (0, "")
    assert "queue bound" in out
    assert "try first" in out
    os.utime(tmp_path / "b", (1, 1))
    with pytest.raises(ConfigError, match="isn't later"):
        _saved(tmp_path / "a", tmp_path / "b", None)


@pytest.mark.parametrize(
    ("texts", "status", "told"),
    [
        (("up 1\n",), 200, "no server that is known"),
        (("<html>not at all",), 200, "no "),
        (("",), 401, "--key"),
        (("",), 404, "are metrics on"),
    ],
)
async def test_what_is_no_known_server_is_said_in_one_line(texts, status, told):
    async with answering(*texts, status=status) as (url, _):
        with pytest.raises(CallFailed, match=told) as failed:
            await _look(f"{url}/metrics", None, 0.1)
    assert len(str(failed.value).splitlines()) == 1


async def test_a_server_that_is_not_there_is_said_in_one_line():
    code, out, err = await hitsend("--url", f"http://127.0.0.1:{free_port()}", "--window", "100ms")
    assert (code, out) == (2, "")
    assert err.startswith("hitsend: http://127.0.0.1:")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(("text", "seconds"), [("10s", 10.0), ("500ms", 0.5), ("2m", 120.0), ("3", 3.0)])
def test_windows_are_times(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1s", "2h", "10ms", "61m", "ten"])
def test_other_windows_are_refused(text):
    with pytest.raises(ConfigError, match="--window"):
        seconds_of(text)


def test_the_path_of_metrics_is_found():
    assert metrics_url("http://h:1/v1/") == "http://h:1/metrics"
    assert metrics_url("https://h/vllm/metrics") == "https://h/vllm/metrics"
    assert metrics_url("h:8000") == "http://h:8000/metrics"
    with pytest.raises(ConfigError, match="--url"):
        metrics_url("ftp://h")


def test_nonsense_is_no_exposition():
    with pytest.raises(CallFailed, match="here: no"):
        parsed('a{b="', "here")


async def test_a_real_load_test_is_a_baseline():
    async with scripted() as server:
        done = await run(plan(server, concurrency=(1, 2), slo=Slo(ttft_ms=60_000)), Quiet())
    base = baseline_of(msgspec.json.encode(document(done)), "load.json")
    assert base.slo_ttft_s == 60.0
    assert base.slo_tpot_s is None
    assert base.tested is not None
    assert base.ttft_s > 0
    assert base.source.startswith("load.json")


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"kind": "other", "targets": []}', b'{"kind":"hitsend.load","targets":[]}']
)
def test_another_document_is_no_baseline(text):
    with pytest.raises(ConfigError, match="--baseline"):
        baseline_of(text, "x.json")


def test_the_terminal_shows_a_verdict_without_findings():
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(shown(diagnose(Figures(server="hitsend", window_s=5.0))))
    assert "Idle: nothing came" in console.file.getvalue()
