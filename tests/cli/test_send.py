"""`send` and `inspect` against a server on a real socket that answers as hitsend does."""

import json
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from hitsend.cli import CallFailed
from hitsend.cli.client import Client, _events
from hitsend.cli.send import Server, _body, _send, safe
from tests.cli.sample import record

pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")


class Stub:
    """hitsend as a client sees it: one model, one answer in three chunks, a record that closes on the second look."""

    def __init__(self):
        self.bodies = []
        self.keys = []
        self.looks = 0
        self.ending = b"data: [DONE]\n\n"
        self.url = ""

    async def models(self, request):
        self.keys.append(request.headers.get("authorization"))
        return web.json_response({"object": "list", "data": [{"id": "smollm2-135m"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        headers = {"x-request-id": "req-1"}
        if body["messages"][-1]["content"] == "refuse":
            error = {"code": "server_overloaded", "message": "queue full (256)", "param": None, "type": "x"}
            return web.json_response({"error": error}, status=503, headers=headers)
        if not body.get("stream"):
            return web.json_response({"choices": [{"message": {"content": "Hé!"}}]}, headers=headers)
        answer = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
        await answer.prepare(request)
        sent = b": ping\n\n"
        for delta in ({"role": "assistant", "content": ""}, {"content": "H\u00e9"}, {"content": "!"}):
            chunk = json.dumps({"choices": [{"index": 0, "delta": delta}]}, ensure_ascii=False)
            sent += f"data: {chunk}\n\n".encode()
        for at in range(0, len(sent), 7):  # in pieces that respect neither lines nor characters
            await answer.write(sent[at : at + 7])
        await answer.write(self.ending)
        return answer

    async def record(self, request):
        self.looks += 1
        assert request.match_info["id"] == "req-1"
        return web.json_response(record() if self.looks > 1 else record(ledger=None, state="running"))


@pytest.fixture
async def stub():
    stub = Stub()
    app = web.Application()
    app.router.add_get("/v1/models", stub.models)
    app.router.add_post("/v1/chat/completions", stub.chat)
    app.router.add_get("/inspect/requests/{id}", stub.record)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


@asynccontextmanager
async def at(url):
    yield Server(url, is_own=False)


async def test_a_streamed_answer_is_written_as_it_comes_and_its_record_awaited(stub, capsys):
    sent = await _send(_body("hi", "be brief", 9), at(stub.url), "sk-1", stream=True, model=None)
    assert capsys.readouterr().out == "Hé!\n"
    assert sent["answer"] == "Hé!"
    assert sent["record"]["ledger"] is not None
    assert stub.bodies == [
        {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
            "max_completion_tokens": 9,
            "model": "smollm2-135m",
            "stream": True,
        }
    ]
    assert stub.keys == ["Bearer sk-1"]


async def test_without_streaming_nothing_is_written_before_the_end(stub, capsys):
    sent = await _send(_body("hi", None, None), at(stub.url), None, stream=False, model="other")
    assert (sent["answer"], sent["request_id"]) == ("Hé!", "req-1")
    assert capsys.readouterr().out == ""
    assert stub.bodies[0]["model"] == "other"


async def test_a_refusal_says_what_the_server_said(stub):
    with pytest.raises(CallFailed, match=r"server_overloaded: queue full \(256\)"):
        await _send(_body("refuse", None, None), at(stub.url), None, stream=True, model=None)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (
            b'data: {"error": {"code": "engine_failed", "message": "the engine died", "param": null}}\n\n',
            "the engine died",
        ),
        (b"", "broke off"),
    ],
)
async def test_an_answer_that_breaks_off_is_no_answer(stub, ending, said, capsys):
    stub.ending = ending
    with pytest.raises(CallFailed, match=said):
        await _send(_body("hi", None, None), at(stub.url), None, stream=True, model=None)
    assert capsys.readouterr().out == "Hé!\n", "what came is shown all the same"


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_an_address_may_end_as_openais_clients_want_it(stub, end):
    async with Client(stub.url + end) as client:
        assert (await client.get("/v1/models"))["data"][0]["id"] == "smollm2-135m"


async def test_nobody_there_is_said_in_one_line():
    async with Client("http://127.0.0.1:9") as client:
        assert not await client.answers()
        with pytest.raises(CallFailed, match="no server at http://127.0.0.1:9"):
            await client.get("/v1/models")


@pytest.mark.parametrize("url", ["nowhere", "127.0.0.1:8000", "ftp://127.0.0.1:9"])
async def test_what_is_no_address_is_said_to_be_none(url):
    async with Client(url) as client:
        with pytest.raises(CallFailed, match="is no address"):
            await client.get("/v1/models")


async def test_event_data_survive_any_cut():
    whole = "data: é1\n\n: ping\n\ndata: 2\n\n".encode()

    async def cut(size):
        for at_byte in range(0, len(whole), size):
            yield whole[at_byte : at_byte + size]

    for size in range(1, len(whole) + 1):
        assert [data async for data in _events(cut(size))] == ["é1", "2"]


def test_an_answer_cannot_drive_the_terminal():
    assert (
        safe("a\x1b[31mb\r\n\tc\x07")
        == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}\n\tc\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.model
def test_without_a_server_the_pipeline_runs_in_this_process(tmp_path):
    """The whole command: no server at the default address, so it loads the bundled model itself."""
    if is_taken(8000):
        pytest.skip("somebody listens at the default address")
    words = [sys.executable, "-m", "hitsend", "send", "Say hello.", "--max-tokens", "8", "--data", str(tmp_path)]
    sent = subprocess.run([*words, "--json"], capture_output=True, text=True, timeout=120, check=True)
    told = json.loads(sent.stdout)
    assert told["answer"]
    assert told["record"]["state"] == "finished"
    assert told["record"]["ledger"]["completion_tokens"] <= 8
    assert "running the pipeline in this process" in sent.stderr


def is_taken(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
