"""A recorded request is asked again: on the real model, and where the answers part."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from hitsend.cli.replay import changed
from hitsend.core.errors import ConfigError
from hitsend.inspect.replay import Export, body_of, compare, export_of, read_export
from tests.served import serving

PARTS = {"request_id": "r", "model": "m", "prompt_token_ids": (1, 2), "max_tokens": 9, "n": 1}


def export(ids, **more):
    return Export(
        **PARTS | {"sampling": {"temperature": 0.5, "seed": 7, "logit_bias": [[3, -1.0]]}} | more,
        output_token_ids={"0": ids},
    )


def test_the_body_is_the_recorded_request_but_for_what_was_changed():
    body = body_of(export([4, 5, 6], ended_itself=("0",)), {"temperature": 0})
    assert body["prompt"] == [1, 2]
    assert (body["temperature"], body["seed"]) == (0, 7)
    assert body["logit_bias"] == {"3": -1.0}
    assert body["max_tokens"] == 4, "one more, to see that it ends there too"
    assert body_of(export([4, 5, 6]), {})["max_tokens"] == 3


@pytest.mark.parametrize(
    ("replayed", "ended", "at"),
    [
        ([4, 5, 6], (), None),
        ([4, 9, 6], (), 1),
        ([4, 5], (), 2),
        ([4, 5, 6, 7], ("0",), 3),
        ([4, 5, 6, 7], (), None),
    ],
)
def test_the_first_difference_is_found(replayed, ended, at):
    (found,) = compare(export([4, 5, 6], ended_itself=ended, steps=(11, 12, 13)), {"output_token_ids": {"0": replayed}})
    assert found.at == at
    assert found.step == ({1: 12, 2: 13}.get(at))


def test_without_token_ids_it_is_said_what_is_missing():
    with pytest.raises(ConfigError, match=r"record\.text"):
        export_of({"request_id": "r", "events": []}, has_texts=True)
    with pytest.raises(ConfigError, match=r"record\.text"):
        compare(export([4]), {})
    with pytest.raises(ConfigError, match="export"):
        read_export(b"{}", "file")


def test_changes_are_fields():
    assert changed(["temperature=0", "model=x", "stop_token_ids=[1]"]) == {
        "temperature": 0,
        "model": "x",
        "stop_token_ids": [1],
    }
    for wrong in ("temperature", "=1", "prompt=[1]", "stream=true"):
        with pytest.raises(ConfigError, match="--set"):
            changed([wrong])


def hitsend(*words):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    return subprocess.run(
        [sys.executable, "-m", "hitsend", *words], env=clean, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.model
@pytest.mark.slow
def test_the_same_request_gives_the_same_answer_and_a_changed_one_shows_where_it_parts(tmp_path):
    with serving("--set", "record.text=true", "--set", "engine.num_slots=2", "--set", "engine.context=512") as served:
        asked = {"temperature": 1.0, "seed": 5, "max_tokens": 24}
        messages = [{"role": "user", "content": "Tell me a story."}]
        body = {"model": served.model, "messages": messages} | asked
        status, _, headers = served.post("/v1/chat/completions", body)
        assert status == 200
        request_id = headers["x-request-id"]
        again = hitsend("replay", request_id, "--url", served.url, "--json")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["is_same"] is True
        file = tmp_path / "flight.json"
        saved = hitsend("inspect", request_id, "--url", served.url, "--export", str(file), "--redact")
        assert (saved.returncode, saved.stdout) == (0, "")
        kept = msgspec.json.decode(file.read_bytes(), type=Export)
        assert kept.texts is None
        assert "story" not in file.read_text()
        other = hitsend("replay", str(file), "--set", "seed=6", "--url", served.url, "--json")
        assert other.returncode == 0, other.stderr
        (choice,) = json.loads(other.stdout)["choices"]
        assert choice["at"] is not None
        assert choice["recorded"] == kept.output_token_ids["0"][choice["at"] :][: len(choice["recorded"])]
        assert choice["recorded"][:1] != choice["replayed"][:1]
        said = hitsend("replay", str(file), "--set", "seed=6", "--url", served.url).stdout
        assert f"token {choice['at']} differs" in said
