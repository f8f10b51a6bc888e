"""A team behind a running server: the command line and `/admin` beside it, and who gets what because of them."""

import asyncio
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.access.issuer import AUDIENCE, ISSUER, SigningKey, issuing
from tests.journeys.test_keys_and_money import hitsend
from tests.served import Served, serving, until

pytestmark = pytest.mark.model

WITHIN_S = 4.0
"""Two seconds are promised; a busy machine may take longer to ask."""


def status(served: Served, method: str, path: str, key: str | None, body: Any = None) -> tuple[int, Any]:
    """Status and JSON (or text) of one request."""
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(served.url + path, raw, {"content-type": "application/json"}, method=method)
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, json.loads(refused.read())


def chat(served: Served, key: str, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3} | fields
    return status(served, "POST", "/v1/chat/completions", key, body)


def test_a_team_is_set_up_from_the_command_line_and_over_http(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path), "--json")
    words = ("--set", "engine.num_slots=2", "--set", "engine.context=512", "--set", "engine.alias=small")
    with serving(*words, data=tmp_path) as served:
        assert status(served, "GET", "/admin/keys", None)[0] == 200, "the machine's owner, while there is no key"
        root = hitsend("keys", "create", "--name", "root", "--role", "admin", *data)
        assert until(lambda: status(served, "GET", "/admin/keys", None)[0], lambda s: s == 401, WITHIN_S) == 401

        made = status(served, "POST", "/admin/keys", root["key"], {"name": "ann", "org": "acme", "user": "ann"})[1]
        watching = hitsend("keys", "create", "--name", "watch", "--role", "reader", *data)
        until(lambda: status(served, "GET", "/v1/models", watching["key"])[0], lambda s: s == 200, WITHIN_S)
        assert chat(served, made["key"])[0] == 200, "honoured at once by the server that made it"
        bob = hitsend("keys", "create", "--name", "bob", "--org", "acme", "--endpoints", "/v1/embeddings", *data)
        until(lambda: status(served, "GET", "/v1/models", bob["key"])[0], lambda s: s == 403, WITHIN_S)

        _its_own_and_no_more(served, made["key"], watching["key"])
        code, denied = chat(served, bob["key"])
        assert (code, denied["error"]["code"]) == (403, "permission_denied")
        assert "/v1/chat/completions" in denied["error"]["message"]

        hitsend("orgs", "create", "acme", "--models", "other", *data)
        assert until(lambda: chat(served, made["key"])[0], lambda s: s == 403, WITHIN_S) == 403
        assert "'small'" in chat(served, made["key"])[1]["error"]["message"]
        assert status(served, "GET", "/v1/models", made["key"])[1]["data"] == []
        hitsend("orgs", "set", "acme", "--models", "none", *data)
        assert until(lambda: chat(served, made["key"])[0], lambda s: s == 200, WITHIN_S) == 200
        hitsend("orgs", "disable", "acme", *data)
        assert until(lambda: chat(served, made["key"])[0], lambda s: s == 401, WITHIN_S) == 401
        assert status(served, "PATCH", "/admin/orgs/acme", root["key"], {"disabled": False})[0] == 200
        assert chat(served, made["key"])[0] == 200

        rotated = hitsend("keys", "rotate", made["id"], "--overlap", "1h", *data)
        assert until(lambda: chat(served, rotated["key"])[0], lambda s: s == 200, WITHIN_S) == 200
        assert chat(served, made["key"])[0] == 200
        path = f"/admin/keys/{made['id']}"
        assert status(served, "POST", f"{path}/rotate", root["key"], {})[0] == 200
        assert chat(served, made["key"])[0] == chat(served, rotated["key"])[0] == 401
        assert status(served, "DELETE", path, root["key"])[0] == 200
    used = {key["name"]: key["last_used_at"] for key in hitsend("keys", "list", *data)}
    assert used["ann"] is not None, "written at the latest when the server stops"
    log = (tmp_path / "server.log").read_text()
    for key in (root, made, watching, bob, rotated):
        assert key["key"].rpartition("_")[2][:16] not in log


def _its_own_and_no_more(served: Served, caller: str, reader: str) -> None:
    listed = status(served, "GET", "/inspect/requests", reader)[1]["requests"]
    assert "ann" in {one["name"] for one in listed}
    own = status(served, "GET", "/inspect/requests", caller)[1]["requests"]
    assert {one["name"] for one in own} == {"ann"}
    for path in ("/metrics", "/inspect/state", "/admin/keys"):
        assert status(served, "GET", path, caller)[0] == 403
    for path, expected in (("/metrics", 200), ("/inspect/state", 200), ("/admin/keys", 403)):
        assert status(served, "GET", path, reader)[0] == expected
    assert chat(served, reader)[0] == 403


def test_a_wrong_value_is_one_line_on_stderr(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hitsend", "keys", "create", "--name", "k", "--usd-day", "1,5"]
    ran = subprocess.run([*command, "--data", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert ran.stdout == ""
    (line,) = ran.stderr.splitlines()
    assert line.startswith("hitsend: --usd-day must be an amount of USD")


async def test_tokens_of_an_issuer_work_beside_keys(tmp_path: Path) -> None:
    key = SigningKey("one")
    async with issuing(key) as issuer:
        words = ("--set", "engine.num_slots=2", "--set", "engine.context=512", "--set", f"oidc.issuer={ISSUER}")
        more = (
            "--set",
            f"oidc.audience={AUDIENCE}",
            "--set",
            f"oidc.jwks_url={issuer.url}",
            "--set",
            "oidc.org_claim=org",
        )
        await asyncio.to_thread(_with_tokens, (*words, *more), tmp_path, key)
        assert issuer.other_hits == []


def _with_tokens(words: tuple[str, ...], data: Path, key: SigningKey) -> None:
    alice, bob = key.token(org="acme", sub="alice"), key.token(org="acme", sub="bob")
    with serving(*words, "--set", "oidc.role_claim=role", data=data) as served:
        assert status(served, "GET", "/v1/models", None)[0] == 401, "an issuer is set: nobody is anonymous"
        code, answer = chat(served, alice)
        assert code == 200
        assert [one["name"] for one in status(served, "GET", "/inspect/requests", alice)[1]["requests"]] == ["alice"]
        path = f"/inspect/requests/{answer['hitsend']['request_id']}"
        assert status(served, "GET", path, alice)[0] == 200
        assert status(served, "GET", path, bob)[0] == 404
        assert status(served, "GET", "/admin/keys", alice)[0] == 403
        assert status(served, "GET", "/admin/keys", key.token(org="acme", role="admin"))[0] == 200
        for wrong in (key.token(org="acme", aud="other"), key.token(), alice[:-2], f"{alice.rpartition('.')[0]}."):
            assert status(served, "GET", "/v1/models", wrong)[0] == 401
        hitsend("orgs", "create", "acme", "--data", str(data), "--json")
        hitsend("orgs", "disable", "acme", "--data", str(data), "--json")
        assert until(lambda: chat(served, alice)[0], lambda s: s == 401, WITHIN_S) == 401
    log = (data / "server.log").read_text()
    assert alice.rpartition(".")[2] not in log
