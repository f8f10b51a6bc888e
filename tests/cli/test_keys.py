import json

import pytest
from typer.testing import CliRunner

from hitsend.cli import CallFailed, keys, usage


def run(app, *arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_a_key_is_shown_once(tmp_path):
    made = json.loads(run(keys.app, "create", "--name", "ci", "--org", "o", "--data", tmp_path, "--json").stdout)
    assert made["key"].startswith(f"hs_{made['id']}_")
    listed = run(keys.app, "list", "--data", tmp_path, "--json").stdout
    (shown,) = json.loads(listed)
    assert (shown["id"], shown["name"], shown["org"], shown["revoked_at"]) == (made["id"], "ci", "o", None)
    assert made["key"].rpartition("_")[2] not in listed
    assert "ci" in run(keys.app, "list", "--data", tmp_path).stdout


def test_without_json_stdout_is_the_key_alone(tmp_path):
    printed = run(keys.app, "create", "--name", "ci", "--data", tmp_path).stdout
    assert printed.strip().startswith("hs_")
    assert len(printed.split()) == 1


def test_a_revoked_key_stays_listed(tmp_path):
    made = json.loads(run(keys.app, "create", "--name", "ci", "--data", tmp_path, "--json").stdout)
    run(keys.app, "revoke", made["id"], "--data", tmp_path)
    (shown,) = json.loads(run(keys.app, "list", "--data", tmp_path, "--json").stdout)
    assert shown["revoked_at"] is not None


def test_what_can_not_be_done_is_one_line(tmp_path):
    with pytest.raises(CallFailed, match="no key with that id"):
        run(keys.app, "revoke", "nope", "--data", tmp_path)
    with pytest.raises(CallFailed, match="name"):
        run(keys.app, "create", "--name", " ", "--data", tmp_path)


def test_usage_of_a_fresh_folder_is_zero(tmp_path):
    report = json.loads(run(usage.app, "--data", tmp_path, "--json").stdout)
    assert (report["totals"]["requests"], report["totals"]["cost_microusd"], report["holds_open"]) == (0, 0, 0)
    assert "0.000000" in run(usage.app, "--data", tmp_path).stdout


def test_dollars_are_printed_to_the_last_micro():
    assert usage.usd(1_735) == "0.001735"
    assert usage.usd(54_600_000) == "54.600000"
    assert usage.usd(1_234_567_890_123) == "1,234,567.890123"
