"""`hitsend chat` as a person meets it: a process on a pseudo-terminal, and in a pipe, against a scripted server."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from aiohttp import web

from hitsend.cli import CallFailed
from hitsend.cli.conversation import Conversation, Lines, command, message
from hitsend.cli.painter import finished_blocks
from tests.cli.sample import record

pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.web_exceptions.NotAppKeyWarning")

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
TIMINGS = {"ttft_ms": 40.0, "decode_own_ms": 100.0}


class Stub:
    """Answers with what was asked, as a list; a question with `wait` is answered by half and then not any more."""

    def __init__(self):
        self.bodies = []
        self.gone = asyncio.Event()
        self.url = ""

    async def models(self, request):
        return web.json_response({"object": "list", "data": [{"id": "m"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            error = {"code": "context_length_exceeded", "message": "too long", "param": None, "type": "x"}
            return web.json_response({"error": error}, status=400)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-request-id": "req-1"})
        await answer.prepare(request)
        for piece in ("", "You said:\n\n", f"- **{question}**\n", "- \x1b[31mred\n\nThe ", "end"):
            await self.send(answer, choices=[{"index": 0, "delta": {"content": piece}, "finish_reason": None}])
        if "wait" in question:
            try:
                while True:
                    await answer.write(b": ping\n\n")
                    await asyncio.sleep(0.02)
            except (ConnectionError, asyncio.CancelledError):
                self.gone.set()
                raise
        extension = {"cost_microusd": 12, "timings": TIMINGS, "request_id": "req-1", "warnings": []}
        await self.send(answer, choices=[], usage=USAGE, hitsend=extension)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def send(self, answer, **chunk):
        await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())

    async def record(self, request):
        return web.json_response(record(state="cancelled"))


@pytest.fixture
async def stub():
    stub = Stub()
    app = web.Application()
    app.router.add_get("/v1/models", stub.models)
    app.router.add_post("/v1/chat/completions", stub.chat)
    app.router.add_get("/inspect/requests/{id}", stub.record)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield stub
    await runner.cleanup()


def start(stub, *words, **channels):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    command_line = [sys.executable, "-m", "hitsend", "chat", "--url", stub.url, *words]
    terminal = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit it ignored
    try:
        return subprocess.Popen(command_line, env=clean | terminal, **channels)
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal:
    """The command on a terminal of its own. `seen` is what was written since the last `type`."""

    def __init__(self, stub, *words):
        self.end, theirs = pty.openpty()
        self.process = start(stub, *words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        self.seen = ""
        asyncio.get_running_loop().add_reader(self.end, self._read)

    def _read(self):
        try:
            self.seen += os.read(self.end, 65536).decode("utf-8", "replace")
        except OSError:
            asyncio.get_running_loop().remove_reader(self.end)

    def type(self, text):
        self.seen = ""
        os.write(self.end, text.encode())

    async def until(self, text):
        async with asyncio.timeout(30):
            while text not in plain(self.seen):
                await asyncio.sleep(0.02)
        return plain(self.seen)

    async def prompted(self, text):
        """Until that stands there and the command waits for a line: only then may one be typed, or Ctrl-C pressed."""
        await self.until(text)
        async with asyncio.timeout(30):
            while not plain(self.seen).endswith("> "):
                await asyncio.sleep(0.02)

    async def ended(self):
        async with asyncio.timeout(20):
            while self.process.poll() is None:
                await asyncio.sleep(0.02)
        return self.process.returncode

    def close(self):
        asyncio.get_running_loop().remove_reader(self.end)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.end)


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
async def talk(stub):
    terminal = Terminal(stub, "--system", "be brief", "--max-tokens", "9")
    yield terminal
    terminal.close()


async def test_a_conversation_on_a_terminal(stub, talk, tmp_path):
    await talk.until("/help lists the commands")
    talk.type("one\r")
    seen = await talk.until("7 in, 3 out · first token 40 ms · 20.0 tokens/s · $0.000012")
    assert " • one" in seen, "Markdown was drawn"
    assert "\x1b[31m" not in talk.seen, "the model can't drive the terminal"
    talk.type("two\\\rlines\r")
    await talk.until("7 in, 3 out")
    assert [turn["role"] for turn in stub.bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert stub.bodies[1]["messages"][-1]["content"] == "two\nlines"
    assert stub.bodies[1]["max_completion_tokens"] == 9
    talk.type("/stats\r")
    await talk.until("2 answers, 14 tokens in, 6 out, $0.000024")
    talk.type(f"/save {tmp_path / 'talk.json'}\r")
    await talk.until("saved to")
    assert len(json.loads((tmp_path / "talk.json").read_text())["messages"]) == 5
    talk.type("/reset\r")
    await talk.until("forgotten")
    talk.type("refuse\r")
    await talk.until("too long")
    talk.type("/system\r")
    await talk.until("system: be brief")
    talk.type("/quit\r")
    assert await talk.ended() == 0


async def test_ctrl_c_cancels_the_answer_says_what_it_cost_and_leaves_at_the_prompt(stub, talk):
    await talk.prompted("/help lists")
    talk.type("please wait\r")
    await talk.until("The end")
    os.killpg(talk.process.pid, 2)
    await talk.prompted("cancelled · ")
    async with asyncio.timeout(30):
        await stub.gone.wait()
    assert f"{record()['usage']['completion_tokens']} out" in plain(talk.seen)
    talk.type("more\r")
    await talk.prompted("7 in, 3 out")
    assert stub.bodies[1]["messages"][-2]["content"].endswith("The end"), "what was shown is remembered"
    os.killpg(talk.process.pid, 2)
    assert await talk.ended() == 0


async def test_in_a_pipe_each_line_is_a_message_and_answers_are_plain(stub):
    process = start(stub, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, aside = await asyncio.to_thread(process.communicate, b'one\n"""\na\nb\n"""\n/quit\n')
    assert process.returncode == 0
    assert out.decode().count("The end\n") == 2
    assert "**one**" in out.decode()
    assert aside.decode().count("7 in, 3 out") == 2
    assert stub.bodies[1]["messages"][-1]["content"] == "a\nb"


async def test_in_a_pipe_the_first_failure_ends_it(stub):
    process = start(stub, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, aside = await asyncio.to_thread(process.communicate, b"refuse\none\n")
    assert process.returncode == 2
    assert aside.decode().strip() == "hitsend: context_length_exceeded: too long"
    assert len(stub.bodies) == 1


def test_what_a_line_means():
    assert command("/system Be brief.") == ("/system", "Be brief.")
    assert command("hello /x") is None
    assert command("//x") is None
    assert message("//x") == "/x"


def test_lines_are_joined():
    lines = Lines()
    assert lines.take("a") == "a"
    assert lines.take("a\\") is None
    assert lines.is_open
    assert lines.take("b") == "a\nb"
    for line in ('"""', "a", "", "b\\"):
        assert lines.take(line) is None
    assert lines.take('"""') == "a\n\nb\\"
    assert not lines.is_open


def test_a_question_without_an_answer_is_taken_back(tmp_path):
    talk = Conversation("m", None, temperature=None, seed=1)
    assert talk.ask("a")["seed"] == 1
    talk.answered("")
    assert talk.turns == []
    talk.ask("b")
    talk.answered("c")
    assert len(talk.messages()) == 2
    talk.save(tmp_path / "x.md")
    assert (tmp_path / "x.md").read_text() == "**user**\n\nb\n\n**assistant**\n\nc\n"
    with pytest.raises(CallFailed, match="is there already"):
        talk.save(tmp_path / "x.md")


@pytest.mark.parametrize(
    ("text", "finished"),
    [
        ("one\n\ntwo is", "one\n\n"),
        ("one\ntwo", ""),
        ("one\n\n", ""),
        ("1. a\n\n2. b\n", ""),
        ("- a\n\n  more of a\n", ""),
        ("```\na\n\nb is code\n", ""),
        ("```\na\n\nb\n```\n\nafter\n", "```\na\n\nb\n```\n\n"),
        ("one\n\n- ", ""),
        ("one\n\ntwo\n\nthree\n\nfour", "one\n\ntwo\n\n"),
    ],
)
def test_only_what_can_not_change_is_finished(text, finished):
    assert finished_blocks(text)[0] == finished
    assert "".join(finished_blocks(text)) == text
