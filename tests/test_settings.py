"""Settings: who wins, who is named when it goes wrong, and what is never printed."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hitsend.core.errors import ConfigError
from hitsend.settings import PooledSettings, Settings, UpstreamSettings
from hitsend.settings_source import described, fields, load, shown

KEYS = {key: kind for key, kind, _ in fields()}


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hitsend.toml"
    path.write_text(text, "utf-8")
    return path


def test_nothing_given_is_the_defaults():
    loaded = load()
    assert loaded.settings == Settings()
    assert loaded.sources == {}


def test_later_sources_win_and_each_value_knows_its_source(tmp_path):
    path = toml(tmp_path, "[engine]\nnum_slots = 2\nstep_tokens = 64\nmax_waiting = 9\n")
    env = {
        "HITSEND__ENGINE__STEP_TOKENS": "65",
        "HITSEND__ENGINE__MAX_WAITING": "10",
        "HOME": "/root",
        "HITSEND_URL": "x",
    }
    loaded = load(path, env, {"engine.max_waiting": "11"})
    engine = loaded.settings.engine
    assert (engine.num_slots, engine.step_tokens, engine.max_waiting) == (2, 65, 11)
    assert loaded.sources == {
        "engine.num_slots": str(path),
        "engine.step_tokens": "environment HITSEND__ENGINE__STEP_TOKENS",
        "engine.max_waiting": "flag engine.max_waiting",
    }


def test_text_becomes_what_the_setting_is():
    env = {
        "HITSEND__RECORD__TEXT": "true",
        "HITSEND__STREAM__PING_S": "2",
        "HITSEND__SERVER__ALLOWED_HOSTS": "a.example, b.example",
        "HITSEND__ENGINE__MODEL": "7",
        "HITSEND__ENGINE__ALIAS": "",
        "HITSEND__PRICES": '[{"model": "*", "input": 0.45, "output": 3.2}]',
    }
    settings = load(None, env).settings
    assert settings.record.text is True
    assert settings.stream.ping_s == 2.0
    assert settings.server.allowed_hosts == ("a.example", "b.example")
    assert settings.engine.model == "7"
    assert settings.engine.alias is None
    assert settings.prices[0].output == 3.2


def test_tables_come_from_the_file(tmp_path):
    path = toml(tmp_path, '[[models]]\nmatch = "qwen3"\nthinking = { top_k = 20 }\n[[models]]\nmatch = "smol"\n')
    loaded = load(path)
    assert [model.match for model in loaded.settings.models] == ["qwen3", "smol"]
    assert loaded.settings.models[0].thinking.top_k == 20
    assert loaded.sources == {"models": str(path)}


@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"HITSEND__ENGINE__NUM_SLOT": "3"}, ["HITSEND__ENGINE__NUM_SLOT", "engine.num_slot", "engine.num_slots?"]),
        ({"HITSEND__ENGINE__NUM_SLOTS": "999"}, ["HITSEND__ENGINE__NUM_SLOTS", "'999'", "at least 1 and at most 256"]),
        ({"HITSEND__ENGINE__NUM_SLOTS": "many"}, ["engine.num_slots", "'many'", "integer"]),
        ({"HITSEND__ENGINE__KV_MODE": "both"}, ["engine.kv_mode", 'one of "auto", "per_stream", "unified"']),
        ({"HITSEND__STREAM__PING_S": "0"}, ["stream.ping_s", "number above 0"]),
        ({"HITSEND__STREAM__PING_S": "inf"}, ["stream.ping_s", "number above 0"]),
        ({"HITSEND__RECORD__TEXT": "maybe"}, ["record.text", "true or false"]),
        ({"HITSEND__PRICES": "[{"}, ["prices", "array of tables"]),
        ({"HITSEND__PRICES": '[{"model": "*", "input": -1, "output": 0}]'}, ["prices", ">= 0", "[0].input"]),
        ({"HITSEND_SERVER_PORT": "1"}, ["HITSEND_SERVER_PORT", "HITSEND__SERVER__PORT"]),
    ],
)
def test_what_cannot_work_is_named_with_its_source_and_what_is_right(env, parts):
    with pytest.raises(ConfigError) as caught:
        load(None, env)
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[engine\n", "line 1"),
        ("[engine]\nnum_slots = '3'\n", "integer"),
        ("[engine.model]\nname = 'x'\n", "engine.model"),
        ("engine = 3\n", "no setting engine"),
        ("[[engine]]\nmodel = 'x'\n", "no setting engine"),
        ("[serve]\nport = 1\n", "server.port?"),
        ("[engines]\nname = 'x'\n", "[[engines]]"),
        ("[[models]]\nmatch = 'x'\nthinking = { temprature = 1 }\n", "temprature"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, part):
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError, match="hitsend.toml") as caught:
        load(path)
    assert part in str(caught.value)


def test_a_file_that_was_asked_for_must_exist(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        load(tmp_path / "none.toml")


def test_a_password_in_a_url_is_never_shown():
    url = "postgresql+asyncpg://bill:s3cret@db.example/ledger"
    assert "s3cret" not in shown("usage.url", url)
    assert "bill" in shown("usage.url", url)
    assert "s3cret" not in shown("access.quota_url", "valkey://:s3cret@limits.example:6379/0")
    for userinfo in ("bill:s3cret", "s3cret", ":s3cret"):
        assert "s3cret" not in shown("tracing.otlp_url", f"https://{userinfo}@traces.example/v1/traces")
    assert shown("tracing.otlp_url", "http://127.0.0.1:4318/v1/traces") == "http://127.0.0.1:4318/v1/traces"
    with pytest.raises(ConfigError) as caught:
        load(None, {"HITSEND__USAGE__URI": url})
    assert "s3cret" not in str(caught.value)


def test_a_key_written_where_its_variable_s_name_belongs_is_not_repeated(tmp_path):
    path = toml(tmp_path, '[[engines]]\nname = "there"\napi_key = "sk-s3cret"\nmodels = { a = "b" }\n')
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "engines[0]: Object contains unknown field api_key" in str(caught.value)
    assert "s3cret" not in str(caught.value)
    path = toml(tmp_path, '[[engines]]\nname = "there"\nbase_url = "http://u:s3cret@h/v1"\nmodels = { a = "b" }\n')
    found = shown("engines", load(path).settings.engines)
    assert found[0]["base_url"] == "http://***@h/v1"


def test_every_setting_has_a_type_in_words():
    assert [key for key, kind in KEYS.items() if not described(kind)] == []


@given(
    st.sampled_from(sorted(KEYS)), st.one_of(st.text(max_size=20), st.integers(), st.floats(), st.booleans()).map(str)
)
def test_any_text_loads_or_is_a_config_error(key, text):
    try:
        loaded = load(None, None, {key: text})
    except ConfigError as error:
        assert key in str(error)
    else:
        assert loaded.sources == {key: f"flag {key}"}
        assert msgspec.convert(msgspec.to_builtins(loaded.settings), Settings) == loaded.settings


def test_engines_without_a_kind_are_upstreams_and_each_kind_has_its_own_settings(tmp_path):
    upstream = '[[engines]]\nname = "there"\nbase_url = "http://127.0.0.1:1/v1"\nmodels = { a = "b" }\n'
    pooled = '[[engines]]\nkind = "embedded"\nname = "here"\nmodel = "m.gguf"\nidle_unload_s = 0\n'
    adapter = '[[adapters]]\nname = "red"\npath = "red.gguf"\n'
    settings = load(toml(tmp_path, upstream + pooled + adapter)).settings
    assert [type(one) for one in settings.engines] == [UpstreamSettings, PooledSettings]
    assert (settings.engines[1].name, settings.engines[1].aliases, settings.adapters[0].scale) == ("here", (), 1.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings
    for text, complaint in (
        (pooled.replace("embedded", "elsewhere"), r"\[0\]\.kind.*elsewhere"),
        (pooled + 'base_url = "x"\n', "unknown field base_url"),
        (upstream + "num_slots = 3\n", "unknown field num_slots"),
        (adapter + "scale = 1000\n", "100"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            load(toml(tmp_path, text))
