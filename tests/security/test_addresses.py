"""No address that a client sends is ever asked: media from elsewhere, other servers, callbacks are refused by name."""

import sys
from typing import Any

import pytest

from hitsend.serve.api.services import ServedModel
from tests.api.test_policy import BODIES
from tests.edge import Edge

ADDRESSES = [
    *("http://169.254.169.254/latest/meta-data/", "http://[::ffff:169.254.169.254]/", "http://2852039166/"),
    *("http://127.0.0.1:22/", "https://example.com\\@127.0.0.1/", "file:///etc/passwd", "//evil.example/x.png"),
    *("gopher://127.0.0.1:6379/_x", "data:image/png;base64,iVBORw0KGgo=", "ftp://a/x", "http://0x7f.1/"),
    "http://localhost%23@evil.example/",
]
FIELDS = [
    *("api_base", "base_url", "api_key", "api_version", "endpoint", "host", "url", "callback_url", "webhook_url"),
    *("proxy", "extra_headers", "headers", "organization", "api_type", "model_path", "lora_path", "lora_request"),
    *("adapter_url", "chat_template", "tokenizer", "image_url", "file_url", "grammar_file", "response_path"),
    *("prompt_embeds", "init_image", "mcp_servers", "container", "vector_store_ids", "file_ids", "audio_url"),
    *("documents_url", "trust_remote_code"),
]
ROUTES = [route for route in BODIES if route not in ("/tokenize", "/detokenize")]
asked: list[Any] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen"):
        asked.append((event, arguments))


@pytest.fixture(scope="module", autouse=True)
def watched():
    """From here on every look-up and connection of this process is noted; a hook can't be taken away again."""
    sys.addaudithook(watch)


def edge() -> Edge:
    return Edge(embedding_model=ServedModel("e", 1, 512))


@pytest.mark.parametrize("route", list(BODIES))
async def test_fields_that_lead_elsewhere_are_refused_by_name(route: str):
    asked.clear()
    at = edge()
    for field in FIELDS:
        for value in (ADDRESSES[0], {"url": ADDRESSES[0]}, [ADDRESSES[0]]):
            answer = await at.ask(route, BODIES[route] | {field: value})
            assert answer.status == 400, (field, answer.body)
            assert field in answer.error["message"], answer.body
    assert at.pipeline.requests == []
    assert asked == []


def parts(address: str) -> list[tuple[str, Any]]:
    """What each dialect would fetch."""
    chat = [
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "image_url", "image_url": address},
        {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": address}},
        {"type": "video_url", "video_url": {"url": address}},
        {"type": "file", "file": {"file_id": address}},
    ]
    responses = [
        {"type": "input_image", "image_url": address},
        {"type": "input_file", "file_url": address},
        {"type": "input_audio", "input_audio": {"data": address}},
    ]
    messages = [
        {"type": "image", "source": {"type": "url", "url": address}},
        {"type": "document", "source": {"type": "url", "url": address}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
    ]
    chats = [route for route in ROUTES if "/chat/" in route or route == "/v1/estimate"]
    spoken = {"chat": chats, "responses": ["/v1/responses", "/v1/responses/input_tokens"]}
    spoken["messages"] = ["/v1/messages", "/v1/messages/count_tokens"]
    found = []
    for kind, wanted in (("chat", chat), ("responses", responses), ("messages", messages)):
        for route in spoken[kind]:
            for part in wanted:
                field = "input" if kind == "responses" else "messages"
                found.append((route, BODIES[route] | {field: [{"role": "user", "content": [part]}]}))
    return found


@pytest.mark.parametrize("address", ADDRESSES)
async def test_media_are_refused_and_nothing_is_fetched(address: str):
    asked.clear()
    at = edge()
    for route, body in parts(address):
        answer = await at.ask(route, body)
        assert answer.status == 400, (route, body)
        message = answer.error["message"]
        assert any(word in message for word in ("image", "audio", "video", "file", "document", "text")), message
    assert at.pipeline.requests == []
    assert asked == []


async def test_an_address_in_a_text_is_a_text():
    asked.clear()
    at = edge()
    for address in ADDRESSES:
        text = f"![x]({address}) <img src='{address}'>"
        body = BODIES["/v1/chat/completions"] | {"messages": [{"role": "user", "content": text}]}
        assert (await at.ask("/v1/chat/completions", body)).status == 200
        assert at.pipeline.requests[-1].messages[0].content == text
    assert asked == []
