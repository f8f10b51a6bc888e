"""`vllm serve` started, watched and stopped by hitsend, with a script in vLLM's place."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from typer.testing import CliRunner

from hitsend import settings
from hitsend.cli.serve import _vllm as started_by_flag
from hitsend.cli.serve import app
from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.app import running
from hitsend.serve.upstreams import build_upstreams, serve_command
from hitsend.settings_source import load
from hitsend.settings_upstreams import VllmSettings
from tests.served import descendants, those_left, until
from tests.upstream.conftest import PRICES, Gateway
from tests.vocabularies import write_checkpoint

pytestmark = pytest.mark.slow  # processes of their own

FAKE = str(Path(__file__).parent / "fake_vllm.py")


def free_port():
    """Below those that the kernel gives to whoever asks for any."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def tree(tmp_path, **fields):
    fields = {
        "serve_model": "some/model",
        "serve_command": (sys.executable, FAKE, "serve"),
        "base_url": f"http://127.0.0.1:{free_port()}",
        "metrics_poll_s": 0.0,
        "retry_share": 0.0,
    } | fields
    one = VllmSettings(name="v", models={"near": "some/model"}, prices=PRICES, **fields)
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model="none"),
        engines=(one,),
    )


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_started_and_started_again_when_it_dies_and_stopped_at_the_end(tmp_path):
    async with running(tree(tmp_path)) as server, aiohttp.ClientSession() as session:
        gate = Gateway(server.base_url, session, None)

        async def pid():
            status, body, _ = await gate.answer()
            if status != 200:
                return None
            first, model = body["choices"][0]["message"]["content"].split()
            assert model == "some/model"
            return int(first)

        first = await pid()
        assert is_there(first)
        os.kill(first, signal.SIGKILL)
        for _ in range(600):
            second = await pid()
            if second not in (None, first):
                break
            await asyncio.sleep(0.1)
        assert second not in (None, first)
    assert not is_there(second)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_still_starts_leaves_nothing_behind(tmp_path, number):
    config = tmp_path / "hitsend.toml"
    mute = json.dumps([sys.executable, "-c", "import time; print('starts', flush=True); time.sleep(600)"])
    config.write_text(
        '[engine]\nmodel = "none"\n[[engines]]\nname = "v"\nkind = "vllm"\nmodels = { a = "b" }\nserve_model = "b"\n'
        f'base_url = "http://127.0.0.1:{free_port()}"\nserve_command = {mute}\n'
    )
    words = [sys.executable, "-m", "hitsend", "serve", "--config", str(config), "--data", str(tmp_path), "--port", "0"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        until((tmp_path / "log").read_text, lambda text: "starts" in text, 60)
        started = descendants(process.pid)
        process.send_signal(number)
        try:
            assert process.wait(60) == (0 if number == signal.SIGTERM else 130)
        finally:
            process.kill()  # what doesn't stop fails here, and isn't waited for without an end
    assert len(started) >= 1
    assert until(lambda: those_left(started), lambda left: not left) == set()


async def test_what_cannot_be_started_stops_the_start(tmp_path):
    for fields, words in (
        ({"serve_command": (str(tmp_path / "none"),)}, "can't be started"),
        ({"serve_command": (sys.executable, "-c", "raise SystemExit(3)")}, "status 3"),
        ({"base_url": "http://192.0.2.1:8000"}, "this machine"),
        ({"base_url": "", "base_urls": ("http://127.0.0.1:1", "http://127.0.0.1:2")}, "this machine"),
    ):
        with pytest.raises(ConfigError, match=words):
            async with running(tree(tmp_path, **fields)):
                pass


def test_its_command_names_model_address_and_names():
    one = VllmSettings(
        name="v",
        base_url="http://127.0.0.1:8001/v1",
        models={"a": "there", "b": "there"},
        serve_model="Qwen/Qwen3.8-27B",
        serve_arguments=("--max-model-len", "4096"),
    )
    assert serve_command(one) == (
        *("vllm", "serve", "Qwen/Qwen3.8-27B", "--host", "127.0.0.1", "--port", "8001"),
        *("--served-model-name", "there", "--enable-prompt-tokens-details", "--max-model-len", "4096"),
    )
    assert load(flags={"engine.model": "none"}).settings.engines == ()


def test_the_flag_takes_a_folder_too(tmp_path):
    folder = tmp_path / "SmolLM2-135M"
    folder.mkdir()
    for model, there in ((str(folder), "smollm2-135m"), (f"{folder}/", "smollm2-135m"), ("Qwen/Qwen3", "Qwen/Qwen3")):
        (one,) = load(flags={"engine.model": "none", "engines": started_by_flag(model, 8100)}).settings.engines
        assert list(one.models.values()) == [there]
        assert serve_command(one)[2] == model
        tree = settings.Settings(server=settings.ServerSettings(data_dir=str(tmp_path)), engines=(one,))
        assert build_upstreams(tree, SystemClock(), lambda *_: None).engines


def test_prompts_of_a_folder_that_is_served_are_counted_by_it(tmp_path):
    folder = write_checkpoint(tmp_path, template="{{ messages[0].content }}")
    there = {"name": "v", "base_url": "http://127.0.0.1:8001/v1", "models": {"a": "a"}, "serve_model": str(folder)}
    for fields, num_texts in (
        ({}, 1),
        ({"serve_model": "Qwen/Qwen3"}, 0),
        ({"counts_prompts": "upstream"}, 0),
        ({"serve_arguments": ("--chat-template", "x.jinja")}, 0),
        ({"serve_arguments": ("--tokenizer=other",)}, 0),
    ):
        one = VllmSettings(**there | fields)
        tree = settings.Settings(server=settings.ServerSettings(data_dir=str(tmp_path)), engines=(one,))
        assert len(build_upstreams(tree, SystemClock(), lambda *_: None).texts) == num_texts, fields


def test_the_flag_takes_what_vllm_gets_besides(tmp_path):
    words = started_by_flag("Qwen/Qwen3", 8100, "--max-model-len 4096 --override '{\"a\": 1}'")
    (one,) = load(flags={"engine.model": "none", "engines": words}).settings.engines
    assert serve_command(one)[-4:] == ("--max-model-len", "4096", "--override", '{"a": 1}')
    with pytest.raises(ConfigError, match="--vllm-arguments"):
        started_by_flag("Qwen/Qwen3", 8100, "'open")


def test_the_flag_wants_a_model():
    found = CliRunner().invoke(app, ["--engine", "vllm"])
    assert isinstance(found.exception, ConfigError)
    assert "--model" in str(found.exception)
