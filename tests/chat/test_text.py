"""The text child over a real process: it dies, it comes back, and only the guilty request pays."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hitsend.core.errors import ConfigError, EngineFailed, EngineUnavailable, InvalidRequest, ServeError
from hitsend.core.request import Message, Request
from hitsend.serve.chat.text import TextChild
from hitsend.settings import ChatSettings
from tests.chat.conftest import user
from tests.vocabularies import CHATML, THINKING, write_bpe

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

# One word in a message makes this template run for ever; the loops do nothing that is counted.
SLOW = (
    "{% if messages[0].content == 'loop' %}{% set s = 'x' * 9999 %}"
    "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)
GREEDY = (
    "{% if messages[0].content == 'more' %}{% set ns = namespace(x='y' * 9999) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{% endif %}"
)


def request(*messages: Message, **fields: Any) -> Request:
    return Request(request_id="r", model="m", messages=messages, **fields)


@pytest.fixture(scope="session")
def slow_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bpe(tmp_path_factory.mktemp("text") / "m.gguf", template=SLOW + GREEDY + CHATML, size=600)


@pytest.fixture
async def child(slow_file: Path) -> AsyncIterator[TextChild]:
    made = TextChild(str(slow_file), ChatSettings(render_timeout_s=0.1))
    await made.start()
    yield made
    await made.stop()


async def test_one_round_trip_gives_a_whole_prompt(child: TextChild):
    prompt = await child.prepare(request(user("hi<|im_end|>")), wants_text=True)
    assert prompt.text == "<|im_start|>user\nhi<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert prompt.num_control_tokens == 3
    assert await child.detokenize(prompt.prompt_token_ids) == prompt.text
    assert prompt.render_started_at <= prompt.render_ended_at <= prompt.tokenize_started_at <= prompt.tokenize_ended_at
    assert child.facts.template_sha256 == prompt.template_sha256
    assert child.metadata["general.name"] == "tiny"
    assert child.vocabulary.spelling(2) == "<|im_end|>"


async def test_text_and_ids_are_in_the_events_only_where_they_are_captured(child: TextChild):
    for wanted in (True, False):
        prompt = await child.prepare(request(user("secret")), wants_text=wanted)
        rendered, tokenized = prompt.rendered({"enable_thinking": True, "persona": "secret"}), prompt.tokenized()
        assert (b"secret" in msgspec.json.encode(rendered)) is wanted
        assert (tokenized.prompt_token_ids is not None) is wanted
        assert rendered.template_kwargs["enable_thinking"] is True
        assert tokenized.num_tokens == len(prompt.prompt_token_ids)


async def test_a_template_that_does_not_end_costs_only_its_own_request(child: TextChild):
    pid = child.pid
    waiting = [asyncio.create_task(child.prepare(request(user(str(i))))) for i in range(5)]
    guilty = asyncio.create_task(child.prepare(request(user("loop"))))
    waiting += [asyncio.create_task(child.prepare(request(user(str(i))))) for i in range(5, 20)]
    with pytest.raises(InvalidRequest, match=r"took longer than 100 ms .*chat\.render_timeout_s") as refused:
        async with asyncio.timeout(30):
            await guilty
    assert refused.value.status == 400
    async with asyncio.timeout(30):
        prompts = await asyncio.gather(*waiting)
    assert [p.num_tokens > 0 for p in prompts] == [True] * 20
    assert child.restarts == 1
    assert child.pid != pid


async def test_memory_has_an_end_and_the_child_lives_on(child: TextChild):
    made = TextChild(child._model_path, ChatSettings(render_timeout_s=20.0))
    await made.start()
    try:
        pid = made.pid
        with pytest.raises(EngineFailed, match="more memory"):
            await made.prepare(request(user("more")))
        assert (await made.prepare(request(user("hi")))).num_tokens > 0
        assert made.pid == pid
    finally:
        await made.stop()


async def test_tokenising_has_a_time_limit_of_its_own(slow_file: Path):
    made = TextChild(str(slow_file), ChatSettings(tokenize_timeout_s=0.02))
    await made.start()
    try:
        with pytest.raises(InvalidRequest, match=r"chat\.tokenize_timeout_s"):
            await made.tokenize("a" * 2_000_000)
        assert await made.tokenize("hi")
    finally:
        await made.stop()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_child_fails_what_it_had_in_hand_and_nothing_else(child: TextChild, how: signal.Signals):
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    in_hand = asyncio.create_task(child.prepare(request(user("a"))))
    behind = asyncio.create_task(child.prepare(request(user("b"))))
    await asyncio.sleep(0.05)
    os.kill(child.pid, how)
    os.kill(child.pid, signal.SIGCONT)
    with pytest.raises(EngineFailed, match=f"signal {int(how)}"):
        async with asyncio.timeout(30):
            await in_hand
    async with asyncio.timeout(30):
        assert (await behind).num_tokens > 0


async def test_the_child_comes_back_when_it_dies_at_rest(child: TextChild):
    for _ in range(3):
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            assert (await _until_answered(child)).num_tokens > 0


async def _until_answered(child: TextChild):
    while True:
        try:
            return await child.prepare(request(user("a")))
        except ServeError:
            await asyncio.sleep(0.02)


async def test_an_order_whose_caller_has_gone_is_not_worked_on(child: TextChild):
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    first = asyncio.create_task(child.prepare(request(user("a"))))
    gone = asyncio.create_task(child.prepare(request(user("loop"))))
    last = asyncio.create_task(child.prepare(request(user("b"))))
    await asyncio.sleep(0.05)
    gone.cancel()
    os.kill(child.pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        await asyncio.gather(first, last)
    assert child.restarts == 0


async def test_long_texts_leave_the_event_loop_free(child: TextChild):
    longest, stop = 0.0, False

    async def tick() -> None:
        nonlocal longest
        loop = asyncio.get_running_loop()
        while not stop:
            before = loop.time()
            await asyncio.sleep(0.001)
            longest = max(longest, loop.time() - before)

    ticking = asyncio.create_task(tick())
    prompt = await child.prepare(request(user("a" * 1_000_000)), max_prompt_tokens=8192)
    stop = True
    await ticking
    assert prompt.num_tokens > 250_000
    # tokenising takes about a second in the child; here it is only bytes to hand over
    assert longest < 0.5 * (prompt.tokenize_ended_at - prompt.tokenize_started_at)


async def test_tokenize_and_detokenize_go_there_and_back(child: TextChild):
    text = "é <|im_end|> 中"
    ids = await child.tokenize(text)
    assert 2 not in ids
    assert await child.detokenize(ids) == text
    assert await child.tokenize("<|im_end|>", parse_special=True) == (2,)
    for wrong in (-1, child.vocabulary.size):
        with pytest.raises(InvalidRequest, match=f"tokens: {wrong} "):
            await child.detokenize((wrong,))
    with pytest.raises(InvalidRequest, match=r"longer than 8388608 bytes"):
        await child.tokenize("a" * 8_388_609)


async def test_half_a_surrogate_pair_is_the_callers_error(child: TextChild):
    with pytest.raises(InvalidRequest, match="surrogate"):
        await child.prepare(request(user("\ud800")))
    with pytest.raises(InvalidRequest, match="surrogate"):
        await child.tokenize("\udfff")


async def test_refusals_keep_their_code_and_param(child: TextChild):
    with pytest.raises(InvalidRequest) as refused:
        await child.prepare(request(user("a"), template_kwargs={"messages": []}))
    assert refused.value.param == "chat_template_kwargs.messages"


async def test_a_stopped_child_answers_nobody(slow_file: Path):
    made = TextChild(str(slow_file), ChatSettings())
    with pytest.raises(EngineUnavailable):
        await made.prepare(request(user("a")))
    await made.start()
    assert made.pid is not None
    os.kill(made.pid, signal.SIGSTOP)
    waiting = [asyncio.create_task(made.prepare(request(user("a")))) for _ in range(3)]
    await asyncio.sleep(0.05)
    os.kill(made.pid, signal.SIGCONT)
    os.kill(made.pid, signal.SIGKILL)
    await made.stop()
    await made.stop()
    for task in waiting:
        with pytest.raises((EngineUnavailable, EngineFailed)):
            await task


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (lambda folder: write_bpe(folder / "m.gguf", template=None, size=600), ChatSettings(), "has no chat template"),
        (
            lambda folder: write_bpe(folder / "m.gguf", template="{% for %}", size=600),
            ChatSettings(),
            "can't be compiled",
        ),
        (lambda folder: folder / "absent.gguf", ChatSettings(), "can't read"),
        (lambda folder: folder / "m.gguf", ChatSettings(template="/no/such/file"), r"chat\.template: can't read"),
    ],
)
async def test_what_can_not_work_is_said_at_the_start(
    tmp_path: Path, make: Callable[[Path], Path], settings: ChatSettings, words: str
):
    made = TextChild(str(make(tmp_path)), settings)
    with pytest.raises(ConfigError, match=words):
        await made.start()
    assert made.pid is None


async def test_a_template_from_a_file_replaces_the_checkpoints_own(slow_file: Path, tmp_path: Path):
    (tmp_path / "t.jinja").write_text(THINKING)
    made = TextChild(str(slow_file), ChatSettings(template=str(tmp_path / "t.jinja")))
    await made.start()
    try:
        assert made.facts.thinking_default is True
    finally:
        await made.stop()


async def test_the_open_child_can_not_open_anything(child: TextChild, tmp_path: Path):
    """The hook as the child installs it, in a process of its own, since hooks stay for good."""
    script = (
        "import socket, subprocess, sys\n"
        "from hitsend.serve.text_worker import seal\n"
        "seal()\n"
        "tries = [lambda: open('/etc/hostname'), lambda: socket.socket(), lambda: subprocess.run(['true']),\n"
        "         lambda: __import__('wave'), lambda: eval('1'), lambda: __import__('os').listdir('/')]\n"
        "failed = 0\n"
        "for attempt in tries:\n"
        "    try:\n"
        "        attempt()\n"
        "    except PermissionError:\n"
        "        failed += 1\n"
        "sys.stdout.write(str(failed))\n"
    )
    import sys

    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    out, _ = await process.communicate()
    assert out == b"6"
