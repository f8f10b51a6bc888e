"""Secrets and prompts with a mark in them, sent along every route, well and badly: nowhere is a piece of them found."""

import asyncio
import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hitsend.serve.api.routes import ROUTES
from tests.access.issuer import ISSUER, SigningKey, issuing
from tests.api.test_policy import BODIES
from tests.security.test_side_doors import family
from tests.served import Served, serving

PIECE = 8
MODEL = "canary-model"
SETTINGS = {
    "engine.num_slots": "2",
    "engine.context": "1024",
    "log.level": "debug",
    "responses.store": "false",
    "oidc.issuer": ISSUER,
    "oidc.audience": "hitsend",
}


def canary() -> str:
    """40 letters and digits that occur nowhere else."""
    return secrets.token_hex(20).translate(str.maketrans("abcdef0123456789", "QZXJVKqzxjvkWYwy"))


def pieces(text: str) -> set[bytes]:
    return {text[start : start + PIECE].encode() for start in range(len(text) - PIECE + 1)}


def ask(served: Served, method: str, path: str, body: bytes | None, *headers: tuple[str, str]) -> tuple[int, bytes]:
    request = urllib.request.Request(served.url + path, body, dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read() + str(answer.headers).encode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read() + str(refused.headers).encode()


def marked(body: Any, prompt: str) -> Any:
    """The body of a route with the prompt wherever somebody's text stands."""
    text = json.dumps(body).replace('"hi"', json.dumps(f"Repeat nothing. {prompt}"))
    return json.loads(text)


def spoiled(body: dict[str, Any], prompt: str) -> list[bytes]:
    """Bodies that are refused, with the prompt in the place that is wrong or beside it.

    Names of fields and tools, and what is wrong in a schema or a grammar, are told to who wrote them: no marks there.
    """
    image = {"type": "image_url", "image_url": {"url": prompt}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "("}}}
    wrong = [
        *(
            {"temperature": prompt},
            {"n": prompt},
            {"stop": [prompt] * 99},
            {"messages": prompt},
            {"input": {"a": prompt}},
        ),
        *({"messages": [{"role": "user", "content": [image]}]}, {"prompt": {"x": prompt}}, {"max_tokens": 10**6}),
        *({"messages": [{"role": "tool", "content": prompt, "tool_call_id": prompt}]}, {"response_format": schema}),
        *({"user": 5}, {"input": [{"type": "message", "role": "user", "content": [{"type": "x", "text": prompt}]}]}),
    ]
    whole = json.dumps(body).encode()
    nonsense = [whole[:-3], whole + b"x", b'"' + prompt.encode() + b'"', prompt.encode(), b"\xff" + whole]
    return [json.dumps(body | one).encode() for one in wrong] + nonsense


class Journey:
    """Everything that a server was asked with marks, and what it said where it refused."""

    def __init__(self, served: Served, data: Path, marks: dict[str, str]) -> None:
        self.served = served
        self.data = data
        self.marks = marks
        self.refusals = b""
        self.seen: dict[int, int] = {}

    def go(self, method: str, path: str, body: bytes | None, secret: tuple[str, str]) -> None:
        status, said = ask(self.served, method, path, body, secret, ("content-type", "application/json"))
        self.seen[status] = self.seen.get(status, 0) + 1
        if status != 200:
            self.refusals += said

    def everywhere(self, secret: tuple[str, str], *, spoils: bool = False) -> None:
        """All routes: as they should be asked, and (`spoils`) with everything wrong that can be."""
        for route, methods in ROUTES.items():
            body = marked(BODIES.get(route, {}), self.marks["prompt"])
            body |= {"model": MODEL} if "model" in body else {}
            body |= {"max_tokens": 4} if route == "/v1/chat/completions" else {}
            for method in methods:
                raw = json.dumps(body).encode() if method in ("POST", "PATCH") else None
                bodies = [raw, *(spoiled(body, self.marks["prompt"]) if spoils and route in BODIES else ())]
                limit = "?frames=2" if route == "/inspect/live" else ""  # else it lasts
                path = route.replace("{id}", "none") + limit
                for one in bodies:
                    self.go(method, path, one, secret)

    def found(self) -> list[str]:
        """Where a piece of a mark is."""
        places = {"refusals": self.refusals, "log": (self.data / "server.log").read_bytes()}
        for path in self.data.rglob("*"):
            if path.is_file():
                places[path.name] = path.read_bytes()
        for pid in family(self.served.process.pid):
            places[f"cmdline of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        admin = ("authorization", f"Bearer {self.marks['admin']}")
        listed = self.served.get("/inspect/requests?limit=1000", self.marks["admin"])["requests"]
        for entry in listed:
            path = f"/inspect/requests/{entry['request_id']}"
            places[path] = ask(self.served, "GET", path, None, admin)[1]
        assert len(listed) > 10
        for path in ("/metrics", "/inspect/state", "/inspect/requests", "/admin/keys", "/admin/users", "/admin/limits"):
            status, places[path] = ask(self.served, "GET", path, None, admin)
            assert status == 200
        return [
            f"{name} in {place}"
            for name, mark in self.marks.items()
            for place, content in places.items()
            if any(piece in content for piece in pieces(mark.rpartition("_")[2]))
        ]


def create(data: Path, *words: str) -> str:
    command = [sys.executable, "-m", "hitsend", "keys", "create", "--json", "--data", str(data), *words]
    return str(json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)["key"])


def journey(data: Path, jwks_url: str, token: str) -> None:
    admin, caller = create(data, "--name", "root", "--role", "admin"), create(data, "--name", "ann")
    marks = {"prompt": canary(), "admin": admin, "caller": caller, "token": token.rpartition(".")[2]}
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    more = ("--set", f"oidc.jwks_url={jwks_url}", "--set", f"engine.alias={MODEL}")
    with serving(*words, *more, data=data) as served:
        went = Journey(served, data, marks)
        went.everywhere(("authorization", f"Bearer {caller}"), spoils=True)
        for secret in (admin, token):
            went.everywhere(("authorization", f"Bearer {secret}"))
        went.everywhere(("authorization", f"Bearer {caller}x"))
        went.everywhere(("x-api-key", admin[:-1]))
        ask(served, "GET", f"/v1/models/{marks['prompt'][:20]}", None)
        assert {200, 400, 401, 403, 404} <= set(went.seen), went.seen
        assert not any(status >= 500 for status in went.seen), went.seen
        assert went.found() == []


@pytest.mark.model
@pytest.mark.slow
async def test_no_piece_of_a_secret_or_a_prompt_is_left_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = canary()
    monkeypatch.setenv("SOMEBODYS_SECRET", secret)
    key = SigningKey("one")
    async with issuing(key) as issuer:
        await asyncio.to_thread(journey, tmp_path, issuer.url, key.token(sub="alice"))
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(piece in everything for piece in pieces(secret))


def test_the_search_finds_what_it_looks_for():
    mark = canary()
    assert len(mark) == 40
    assert any(piece in f"--{mark[11:19]}--".encode() for piece in pieces(mark))
    assert not any(piece in f"--{mark[11:18]}--".encode() for piece in pieces(mark))
