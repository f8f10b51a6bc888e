"""`hitsend orgs`, `apps`, `users`, `limits`, and the terms of keys."""

import json

import pytest

from hitsend.cli import CallFailed, apps, keys, limits, orgs, users
from tests.cli.test_keys import run


def told(app, *arguments, data):
    """What a command says with --json."""
    return json.loads(run(app, *arguments, "--data", data, "--json").stdout)


EVERY_FLAG = (
    "--rpm", 60, "--input-tpm", 1000, "--output-tpm", 500, "--parallel", 4, "--request-tokens", 300,
    "--usd-day", "1.5", "--usd-month", "20.000001", "--models", "a, b", "--tier", 2, "--max-tier", 1,
)  # fmt: skip
LIMITS = {
    "requests_per_minute": 60,
    "input_tokens_per_minute": 1000,
    "output_tokens_per_minute": 500,
    "parallel_requests": 4,
    "tokens_per_request": 300,
    "usd_per_day": "1.5",
    "usd_per_month": "20.000001",
}


@pytest.mark.parametrize(
    ("app", "where", "place"),
    [
        (orgs.app, ("acme",), "acme"),
        (apps.app, ("bot", "--org", "acme"), "acme/bot"),
        (apps.app, ("bot",), "/bot"),
        (users.app, ("ann", "--org", "acme", "--app", "bot"), "acme/bot/ann"),
        (users.app, ("ann",), "//ann"),
    ],
)
def test_a_level_is_made_changed_disabled_and_enabled(tmp_path, app, where, place):
    made = told(app, "create", *where, *EVERY_FLAG, data=tmp_path)
    assert (made["id"], made["limits"], made["models"]) == (place, LIMITS, ["a", "b"])
    assert (made["tier"], made["max_tier"]) == (2, 1)
    assert told(app, "list", data=tmp_path) == [made]
    changed = told(app, "set", *where, "--rpm", "none", "--usd-day", "0", "--models", "none", data=tmp_path)
    left = {name: value for name, value in LIMITS.items() if name != "requests_per_minute"}
    assert changed == made | {"limits": left | {"usd_per_day": "0"}, "models": None}
    assert told(app, "disable", *where, data=tmp_path)["disabled_at"] is not None
    assert told(app, "enable", *where, data=tmp_path)["disabled_at"] is None
    assert "usd-month 20.000001" in run(app, "list", "--data", tmp_path).stdout
    with pytest.raises(CallFailed, match="exists already"):
        run(app, "create", *where, "--data", tmp_path)


def test_what_holds_for_everybody(tmp_path):
    assert told(limits.app, "show", data=tmp_path)["limits"] == {}
    assert told(limits.app, "set", "--parallel", 9, data=tmp_path)["limits"] == {"parallel_requests": 9}
    assert told(limits.app, "show", data=tmp_path)["limits"] == {"parallel_requests": 9}
    assert "parallel" in run(limits.app, "show", "--data", tmp_path).stdout


def test_a_key_gets_all_that_is_asked_for(tmp_path):
    words = ("--org", "o", "--app", "a", "--user", "u", "--role", "reader", "--endpoints", "/v1/embeddings,/inspect")
    made = told(keys.app, "create", "--name", "k", *words, *EVERY_FLAG, "--expires", "30d", data=tmp_path)
    (shown,) = told(keys.app, "list", data=tmp_path)
    assert shown["limits"] == LIMITS
    assert (shown["role"], shown["endpoints"]) == ("reader", ["/v1/embeddings", "/inspect"])
    assert (shown["org"], shown["app"], shown["user"], shown["models"]) == ("o", "a", "u", ["a", "b"])
    assert shown["expires_at"] == made["expires_at"] == pytest.approx(shown["created_at"] + 30 * 86_400)
    changed = told(
        keys.app, "set", made["id"], "--expires", "none", "--endpoints", "none", "--role", "admin", data=tmp_path
    )
    assert (changed["expires_at"], changed["endpoints"], changed["role"]) == (None, None, "admin")
    assert changed["limits"] == LIMITS
    assert "reader" not in run(keys.app, "list", "--data", tmp_path).stdout


def test_a_rotated_key_is_shown_once_under_its_old_id(tmp_path):
    made = told(keys.app, "create", "--name", "k", data=tmp_path)
    rotated = told(keys.app, "rotate", made["id"], "--overlap", "24h", data=tmp_path)
    assert rotated["id"] == made["id"]
    assert rotated["key"] != made["key"]
    (shown,) = told(keys.app, "list", data=tmp_path)
    assert shown["overlap_until"] == pytest.approx(shown["rotated_at"] + 86_400)
    alone = run(keys.app, "rotate", made["id"], "--data", tmp_path)
    assert alone.stdout.strip().startswith(f"hs_{made['id']}_")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rpm", "0"), "--rpm: expected a whole number from 1 to 100000000 or none, not '0'"),
        (("--rpm", "many"), "--rpm: .* not 'many'"),
        (("--rpm", "1.5"), "--rpm"),
        (("--input-tpm", "100000001"), "--input-tpm"),
        (("--output-tpm", "-1"), "--output-tpm"),
        (("--parallel", "1e3"), "--parallel: expected a whole number from 1 to 1000000 or none"),
        (("--request-tokens", ""), "--request-tokens"),
        (("--usd-day", "1,5"), "--usd-day must be an amount of USD .* not '1,5'"),
        (("--usd-month", "0.0000001"), "--usd-month must be an amount of USD .* at most 6 decimals"),
        (("--tier", "10"), "--tier: expected a whole number from 0 to 9 or none, not '10'"),
        (("--models", "a,,b"), "--models: expected names"),
    ],
)
@pytest.mark.parametrize(
    "command", [(orgs.app, "create", "o"), (keys.app, "create", "--name", "k"), (limits.app, "set")]
)
def test_a_wrong_value_is_one_line_that_names_the_flag(tmp_path, command, words, said):
    with pytest.raises(CallFailed, match=said):
        run(*command, *words, "--data", tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("create", "--name", "k", "--endpoints", "/v2"), r"--endpoints\[0\]: no route"),
        (("create", "--name", "k", "--expires", "yesterday"), "--expires must be like 30d, .* not 'yesterday'"),
        (("create", "--name", "k", "--org", "a/b"), "org must not hold a slash"),
        (("set", "nope", "--rpm", "5"), "no key with that id"),
        (("set", "nope"), "nothing to set"),
        (("rotate", "nope"), "no key with that id"),
        (("rotate", "nope", "--overlap", "soon"), "--overlap must be a length of time .* not 'soon'"),
    ],
)
def test_what_a_key_can_not_have_is_one_line(tmp_path, words, said):
    with pytest.raises(CallFailed, match=said):
        run(keys.app, *words, "--data", tmp_path)
