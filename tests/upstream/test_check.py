"""`hitsend engines list` and `check`, as somebody types them."""

import asyncio
import fcntl
import json
import os
import pty
import struct
import sys
import termios

import pytest

from hitsend.core.errors import ConfigError
from hitsend.serve.app import running
from hitsend.serve.engine.probe import probe
from hitsend.serve.upstreams import kept_secret, key_of
from hitsend.settings import EngineSettings, ServerSettings, Settings
from hitsend.settings_upstreams import UpstreamPrices, UpstreamSettings
from tests.upstream.asking import engine_of
from tests.upstream.workers_ai import ACCOUNT, KEY, Emulator

pytestmark = pytest.mark.slow  # a process of its own

TOML = """
[engine]
model = "none"

[[engines]]
name = "cf"
kind = "workers_ai"
base_url = "{root}{account}"
api_key_file = "{key_file}"
models = {{ "qwen3.8-27b" = "@cf/qwen/qwen3.8-27b", "gone" = "@cf/meta/gone" }}

[[engines]]
name = "away"
kind = "openai"
server = "ollama"
base_url = "http://127.0.0.1:1/v1"
models = {{ "small" = "llama3.2" }}
"""


async def hitsend(*arguments, columns=200):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "hitsend", "engines", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"COLUMNS": str(columns)},
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def config(tmp_path, mock):
    mock.script = Emulator()
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n")
    path = tmp_path / "hitsend.toml"
    root = mock.url.removesuffix("/v1")
    path.write_text(TOML.format(root=root, account=ACCOUNT, key_file=key_file))
    return path


async def paints(call):
    await call.start()
    await call.say("\x1b[31mred")
    await call.finish()


async def test_list_names_everything_and_no_key(config):
    code, out, _ = await hitsend("list", "--json", "--config", str(config))
    rows = {row["name"]: row for row in json.loads(out)["engines"]}
    assert (code, set(rows)) == (0, {"cf", "away"})
    assert rows["cf"]["models"]["qwen3.8-27b"] == "@cf/qwen/qwen3.8-27b"
    assert rows["cf"]["key"].endswith("key")
    assert KEY not in out
    assert {"n", "logit_bias", "top_k"} <= set(rows["away"]["drops"])
    code, out, _ = await hitsend("list", "--config", str(config))
    assert (code, "workers_ai" in out) == (0, True)
    _, out, _ = await hitsend("list", "--config", str(config), columns=40)
    assert all(url in out for row in rows.values() for url in row["base_urls"]), "a pipe is as wide as it has to be"


async def test_in_a_narrow_terminal_no_column_is_cut_to_pieces(config):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    command = (sys.executable, "-m", "hitsend", "engines", "list", "--config", str(config))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = await asyncio.create_subprocess_exec(*command, stdout=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    assert await process.wait() == 0
    assert "where: http://127.0.0.1:1/v1\r\n" in os.read(ours, 65_536).decode()
    os.close(ours)


async def test_check_reaches_authenticates_lists_and_measures(config, mock):
    code, out, _ = await hitsend("check", "cf", "--json", "--config", str(config))
    row = json.loads(out)["engines"][0]
    server = row["servers"][0]
    assert (code, row["is_well"], server["reaches"], server["authenticates"]) == (0, True, True, True)
    assert server["listed"] == {"@cf/qwen/qwen3.8-27b": True, "@cf/meta/gone": False}
    assert server["ttft_ms"] > 0
    assert server["gives_usage"] is True
    assert any("enable_thinking" in change for change in row["changes"])
    asked = [path for path, _ in mock.script.calls if not path.endswith("/search")]
    assert len(asked) == 1, "once"
    code, out, _ = await hitsend("check", "cf", "--no-ask", "--config", str(config))
    assert (code, len([path for path, _ in mock.script.calls if not path.endswith("/search")])) == (0, 1)
    assert "not in its list of models" in out


async def test_an_upstream_that_only_embeds_is_shown_and_asked_for_a_vector(tmp_path, mock):
    async def script(call):
        await call.answer("200 OK", {"data": [{"index": 0, "embedding": [1.0, 0.0]}], "usage": {"prompt_tokens": 3}})

    mock.script = script
    path = tmp_path / "hitsend.toml"
    engine = f'[engine]\nmodel = "none"\n[[engines]]\nname = "e"\nbase_url = "{mock.url}"\n'
    path.write_text(engine + 'embedding_models = { "near" = "far" }\n')
    code, out, _ = await hitsend("check", "--json", "--config", str(path))
    row = json.loads(out)["engines"][0]
    assert (code, row["is_well"], row["servers"][0]["gives_usage"]) == (0, True, True)
    assert row["servers"][0]["listed"] == {"far": False}
    assert [call.body.get("model") for call in mock.calls] == [None, "far"]
    _, out, _ = await hitsend("list", "--config", str(path))
    assert "near → far" in out
    mock.script = lambda call: call.answer("404 No", {})
    code, out, _ = await hitsend("check", "--config", str(path))
    assert (code, "far its name there?" in out) == (1, True)
    path.write_text(engine)
    code, out, _ = await hitsend("check", "--config", str(path))
    assert (code, "it serves no model" in out) == (1, True)


async def test_an_answer_that_never_ends_is_a_fault(mock, monkeypatch):
    async def script(call):
        if not call.body:
            await call.answer("200 OK", {"data": []})
            return
        await call.start()
        while not call.has_left.is_set():
            await call.raw(b": still here\n\n")
            await asyncio.sleep(0.02)

    mock.script = script
    monkeypatch.setattr("hitsend.serve.engine.probe.ANSWER_S", 0.3)
    settings = UpstreamSettings(name="there", base_url=mock.url, models={"near": "far"}, embedding_models={"e": "far"})
    async with engine_of(settings) as engine:
        found = await probe(engine, engine.replicas.all[0], asks=True)
    assert (found.is_well, found.fault) == (False, "its answer was not finished after 0 s")


async def test_check_says_what_is_wrong_and_ends_with_1(config, mock):
    code, out, _ = await hitsend("check", "--json", "--config", str(config))
    rows = {row["name"]: row for row in json.loads(out)["engines"]}
    assert (code, rows["away"]["is_well"], rows["away"]["servers"][0]["reaches"]) == (1, False, False)
    assert rows["away"]["servers"][0]["fault"].endswith("nobody listens there")
    assert rows["cf"]["servers"][0]["fault"] is None
    (config.parent / "key").write_text("wrong")
    code, out, _ = await hitsend("check", "cf", "--config", str(config))
    assert (code, "authenticates NO" in out) == (1, True)
    mock.script = lambda call: call.answer("404 No", {})
    code, out, _ = await hitsend("check", "cf", "--config", str(config))
    assert (code, "Is base_url right, and @cf/qwen/qwen3.8-27b its name there?" in out) == (1, True)
    code, _, err = await hitsend("check", "nobody", "--config", str(config))
    assert (code, "nobody" in err) == (2, True)


async def test_diff_shows_what_differs_between_two_models_of_a_server(tmp_path, mock):
    fields = {"models": {"near": "far"}, "base_url": mock.url}
    there = UpstreamSettings(name="there", prices=UpstreamPrices(input=1.0, output=2.0), **fields)
    fields["models"] = {"cheap": "far"}
    ollama = UpstreamSettings(
        name="ollama", server="ollama", prices=UpstreamPrices(input=0.0, output=0.0), max_tokens=7, **fields
    )
    tree = Settings(
        server=ServerSettings(data_dir=str(tmp_path)), engine=EngineSettings(model="none"), engines=(there, ollama)
    )
    async with running(tree) as server:
        code, out, _ = await hitsend("diff", "near", "cheap", "--prompt", "hi", "--url", server.base_url, "--json")
        document = json.loads(out)
        first, second = document["sides"]
        assert (code, first["engine"], second["engine"]) == (0, "there", "ollama")
        assert (first["cost_microusd"], second["cost_microusd"]) == (13, 0)
        assert first["answer"]["content"] == second["answer"]["content"] == "Hello!"
        assert {"engine", "cost_microusd"} <= set(document["differs"])
        code, out, _ = await hitsend("diff", "near", "nowhere", "--prompt", "hi", "--url", server.base_url)
        assert (code, "model_not_found" in out) == (0, True), "a refusal is a result"
        mock.script = paints
        code, out, _ = await hitsend("diff", "near", "cheap", "--prompt", "hi", "--url", server.base_url)
        assert (code, "[31mred" in out, "\x1b" in out) == (0, True, False), "an answer can't drive the terminal"


def test_a_key_comes_from_a_file_or_a_variable_and_not_from_both(tmp_path, monkeypatch):
    fields = {"name": "there", "base_url": "http://127.0.0.1:1/v1", "models": {"a": "b"}}
    path = tmp_path / "key"
    path.write_text("  from-file\n")
    assert key_of(UpstreamSettings(**fields, api_key_file=str(path))) == "from-file"
    assert key_of(UpstreamSettings(**fields)) is None
    monkeypatch.setenv("ENGINE_TEST_KEY", " from-env\n")
    assert key_of(UpstreamSettings(**fields, api_key_env="ENGINE_TEST_KEY")) == "from-env"
    for wrong in (
        {"api_key_file": str(path), "api_key_env": "ENGINE_TEST_KEY"},
        {"api_key_file": str(tmp_path / "none")},
    ):
        with pytest.raises(ConfigError, match="api_key_file"):
            key_of(UpstreamSettings(**fields, **wrong))
    path.write_text("two\nlines")
    with pytest.raises(ConfigError, match="usable"):
        key_of(UpstreamSettings(**fields, api_key_file=str(path)))


def test_the_houses_secret_stays_and_is_for_its_user_alone(tmp_path):
    path = tmp_path / "data" / "upstreams.secret"
    first = kept_secret(path)
    assert (len(first), kept_secret(path) == first, path.stat().st_mode & 0o777) == (32, True, 0o600)
    assert [one.name for one in path.parent.iterdir()] == ["upstreams.secret"]
