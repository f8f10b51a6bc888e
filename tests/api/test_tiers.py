"""service_tier and priority: in every dialect, and no better than the key may have."""

import msgspec
import pytest

from hitsend.core.request import Principal
from tests.edge import Edge, chat_body

KEYS = {
    "plain": Principal(key_id="plain"),
    "fast": Principal(key_id="fast", tier=1, max_tier=0),
    "own": Principal(key_id="own", tier=0, max_tier=0),
    "slow": Principal(key_id="slow", tier=2, max_tier=2),
}
SAID = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": chat_body(),
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "messages": SAID, "max_tokens": 9},
}
OPENAI = [path for path in BODIES if path != "/v1/messages"]


async def ask(key, path="/v1/chat/completions", **fields):
    edge = Edge(keys=KEYS)
    answer = await edge.ask(path, BODIES[path] | fields, (b"authorization", f"Bearer {key}".encode()))
    return answer, (edge.pipeline.requests or [None])[0]


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("key", "fields", "tier"),
    [
        ("plain", {}, 1),
        ("own", {}, 0),
        ("plain", {"service_tier": "auto"}, 1),
        ("own", {"service_tier": "auto"}, 0),
        ("slow", {"service_tier": "auto"}, 2),
        ("own", {"service_tier": "default"}, 1),
        ("plain", {"service_tier": "flex"}, 2),
        ("fast", {"service_tier": "priority"}, 0),
        ("fast", {"priority": -7}, 0),
        ("slow", {"priority": 0}, 2),
        ("own", {"priority": 3}, 2),
        ("fast", {"service_tier": "priority", "priority": -1}, 0),
    ],
)
async def test_the_tier_asked_for_is_the_tier_served(path, key, fields, tier):
    answer, request = await ask(key, path, **fields)
    assert answer.status == 200
    assert request.served_tier == tier


@pytest.mark.parametrize("path", BODIES)
async def test_a_better_tier_than_the_key_s_is_refused_by_name(path):
    answer, request = await ask("plain", path, priority=-1)
    assert (answer.status, request) == (403, None)
    assert "priority: tier 0 was asked for, this key's best is tier 1" in answer.error["message"]


@pytest.mark.parametrize("path", OPENAI)
async def test_service_tier_is_refused_by_name_too(path):
    for key, wanted in (("plain", "priority"), ("slow", "default")):
        answer, _ = await ask(key, path, service_tier=wanted)
        assert (answer.status, answer.error["param"], answer.error["code"]) == (
            403,
            "service_tier",
            "permission_denied",
        )
    for fields, param in (
        ({"service_tier": "scale"}, "service_tier"),
        ({"service_tier": "flex", "priority": -1}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": 2**31}, "priority"),
    ):
        answer, _ = await ask("fast", path, **fields)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_messages_has_words_of_its_own():
    for key, fields, tier, told in (
        ("plain", {"service_tier": "auto"}, 1, "standard"),
        ("own", {"service_tier": "auto"}, 0, "priority"),
        ("own", {"service_tier": "standard_only"}, 1, "standard"),
        ("slow", {"service_tier": "standard_only"}, 2, "standard"),
        ("fast", {"priority": -1}, 0, "priority"),
    ):
        answer, request = await ask(key, "/v1/messages", **fields)
        assert request.served_tier == tier
        assert answer.json()["usage"]["service_tier"] == told


async def test_the_answer_names_the_tier_that_was_used():
    answer, _ = await ask("own", service_tier="auto")
    assert answer.json()["service_tier"] == "priority"
    answer, _ = await ask("own")
    assert "service_tier" not in answer.json()
    answer, _ = await ask("own", stream=True, service_tier="flex")
    frames = [
        frame.removeprefix("data: ") for frame in answer.body.decode().split("\n\n") if frame.startswith("data: {")
    ]
    assert {msgspec.json.decode(frame)["service_tier"] for frame in frames} == {"flex"}
    answer, _ = await ask("slow", "/v1/responses")
    assert answer.json()["service_tier"] == "flex"


def test_a_principal_s_tenant_goes_from_the_organisation_to_the_key():
    assert Principal(key_id="k", user="u", org="o").tenant == ("o", "", "u", "k")
    assert Principal().tenant == ("", "", "", "")
