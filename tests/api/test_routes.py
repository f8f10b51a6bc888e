import base64
import re
from typing import Any

import pytest

from hitsend.core.request import Principal
from hitsend.serve.api.exchange import RequestIds
from hitsend.serve.api.routes import OPEN_TO_ALL, ROUTES
from hitsend.serve.api.services import Health
from hitsend.settings import AccessSettings, ServerSettings
from tests.edge import Call, Edge, chat_body

KEYS = {"hs_good": Principal(key_id="k1", name="one"), "hs_other": Principal(key_id="k2", name="two")}
BEARER = (b"authorization", b"Bearer hs_good")
EVERY_ROUTE = [(template.replace("{id}", "x"), method) for template, methods in ROUTES.items() for method in methods]


@pytest.mark.parametrize(("path", "method"), [*EVERY_ROUTE, ("/nowhere", "GET"), ("/v1/chat/completions/", "POST")])
async def test_every_route_but_healthz_needs_a_key_once_there_is_one(path: str, method: str):
    edge = Edge(keys=KEYS)
    body = chat_body() if method == "POST" else None
    for headers in ((), ((b"authorization", b"Bearer wrong"),), (BEARER, BEARER)):
        answer = await edge.ask(path, body, *headers, method=method)
        if path in OPEN_TO_ALL:
            assert answer.status == 200
        else:
            code = "authentication_error" if path.startswith("/v1/messages") else "invalid_api_key"
            assert (answer.status, answer.error["code"]) == (401, code)
            assert b"Bearer" in answer.headers[b"www-authenticate"]
    assert edge.flights.all == []
    assert edge.pipeline.requests == []


HOSTS = [
    b"/",
    b"?",
    b"#",
    b"a@b",
    b"a b",
    b"",
    b"a/b",
    b"[::1",
    b"a:99999",
    b"a:b",
    b"\xe9",
    b"a,b",
    b"/healthz?",
    b"-a",
    b"a\\b",
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/inspect/state"])
async def test_a_malformed_host_is_refused_whatever_it_says(host: bytes, path: str):
    edge = Edge(keys=KEYS)
    answer = await edge.ask(path, None, (b"host", host))
    assert answer.status == 400
    assert answer.error["code"] == "invalid_request"


async def test_two_hosts_or_none_are_refused():
    edge = Edge()
    call = Call(edge.app, "/v1/models", None, ((b"host", b"localhost"), (b"host", b"localhost")), None)
    await call.run()
    assert call.answer.status == 400
    call = Call(edge.app, "/v1/models", None, (), None)
    call.scope["headers"] = []
    await call.run()
    assert call.answer.status == 400


async def test_an_anonymous_server_answers_only_to_names_of_this_machine():
    edge = Edge()
    for host in (b"localhost", b"127.0.0.1:8000", b"[::1]:80", b"LOCALHOST"):
        assert (await edge.ask("/v1/models", None, (b"host", host))).status == 200
    assert (await edge.ask("/v1/models", None, (b"host", b"evil.example"))).status == 403
    assert (await edge.ask("/healthz", None, (b"host", b"10.1.2.3"))).status == 200
    keyed = Edge(keys=KEYS)
    assert (await keyed.ask("/v1/models", None, (b"host", b"any.example"), BEARER)).status == 200
    listed = Edge(keys=KEYS, server=ServerSettings(allowed_hosts=("api.example",)))
    assert (await listed.ask("/v1/models", None, (b"host", b"api.example"), BEARER)).status == 200
    assert (await listed.ask("/v1/models", None, (b"host", b"any.example"), BEARER)).status == 403


async def test_another_site_cannot_use_a_visitor_s_anonymous_server_or_stored_password():
    edge = Edge()
    body = chat_body()
    assert (await edge.ask("/v1/chat/completions", body, (b"origin", b"http://evil.example"))).status == 403
    assert (await edge.ask("/v1/chat/completions", body, (b"origin", b"null"))).status == 403
    assert (await edge.ask("/v1/chat/completions", body, (b"origin", b"http://127.0.0.1:8000"))).status == 200
    keyed = Edge(keys=KEYS)
    basic = (b"authorization", b"Basic " + base64.b64encode(b"me:hs_good"))
    assert (await keyed.ask("/inspect", None, basic)).status == 200
    assert (await keyed.ask("/inspect", None, basic, (b"origin", b"http://evil.example"))).status == 403
    assert (await keyed.ask("/inspect", None, BEARER, (b"origin", b"http://elsewhere"))).status == 200
    for broken in (b"!!", b"\xff", b"\xe9" * 40, b""):
        assert (await keyed.ask("/inspect", None, (b"authorization", b"Basic " + broken))).status == 401


async def test_a_wrong_method_names_the_right_ones_and_head_is_a_get():
    edge = Edge()
    answer = await edge.ask("/v1/chat/completions", method="GET")
    assert (answer.status, answer.headers[b"allow"]) == (405, b"POST")
    assert answer.error["code"] == "method_not_allowed"
    assert (await edge.ask("/v1/models", method="HEAD")).status == 200
    assert (await edge.ask("/v1/models", {}, method="POST")).status == 405


async def test_a_base_url_with_one_part_too_many_or_few_is_told_what_was_meant():
    edge = Edge()
    for path in ("/chat/completions", "/v1/v1/chat/completions", "//v1/chat/completions", "/v1//chat/completions"):
        for end in ("", "/"):
            answer = await edge.ask(path + end, chat_body())
            assert (answer.status, answer.error["message"]) == (
                404,
                "no such route; did you mean /v1/chat/completions?",
            )
    assert (await edge.ask("/v1/<b>")).error["message"] == "no such route"


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"", "empty"), (b" \r\n", "empty"), (b"\xef\xbb\xbf{}", "byte order mark"), (b"{", "character 1")],
)
async def test_a_body_that_is_no_json_is_told_why(body: bytes, why: str):
    answer = await Edge().ask("/v1/chat/completions", body)
    assert (answer.status, why in answer.error["message"]) == (400, True)


async def test_every_answer_has_a_request_id():
    edge = Edge()
    for path in ("/v1/models", "/nowhere", "/healthz"):
        answer = await edge.ask(path)
        assert re.fullmatch(rb"req_[0-9a-f]{24}", answer.headers[b"x-request-id"])
    answer = await edge.ask("/nowhere", None, (b"x-request-id", b"my.own-ID_1"))
    assert answer.headers[b"x-request-id"] == b"my.own-ID_1"
    for bad in (b"", b"a b", b"a\r\nb", b"x" * 129, "é".encode(), b"../x"):
        answer = await edge.ask("/nowhere", None, (b"x-request-id", bad))
        assert answer.headers[b"x-request-id"].startswith(b"req_")


def test_an_id_that_was_used_gets_a_suffix_so_no_two_records_share_one():
    ids = RequestIds(remembered=3)
    first, second = ids.choose([b"same"]), ids.choose([b"same"])
    assert first == "same"
    assert re.fullmatch(r"same-[0-9a-f]{12}", second)
    assert len(ids.choose([b"x" * 128])) == 128
    assert len(ids.choose([b"x" * 128])) <= 128


async def test_bodies_are_refused_by_their_headers_without_being_read():
    edge = Edge(access=AccessSettings(max_body_bytes=100))
    for header, status in (
        ((b"content-length", b"101"), 413),
        ((b"content-length", b"9" * 30), 413),
        ((b"content-length", b"-5"), 400),
        ((b"content-encoding", b"gzip"), 415),
        ((b"content-type", b"text/plain"), 415),
        ((b"content-type", b"application/x-www-form-urlencoded"), 415),
        ((b"content-type", b"application/json; charset=latin-1"), 415),
    ):
        call = Call(edge.app, "/v1/chat/completions", b"x", (header,), None)
        await call.run()
        assert call.answer.status == status
        assert call.pieces == [b"x"]
    assert "limit 100" in (await edge.ask("/tokenize", b"x" * 101)).error["message"]


async def test_a_chunked_body_is_cut_at_the_limit_and_a_slow_one_at_the_time():
    edge = Edge(access=AccessSettings(max_body_bytes=10))
    call = Call(edge.app, "/v1/chat/completions", b"", (), None)
    call.pieces = [b"12345"] * 100
    await call.run()
    assert call.answer.status == 413
    assert len(call.pieces) == 97
    edge = Edge(access=AccessSettings(body_timeout_s=0.02))
    call = Call(edge.app, "/v1/chat/completions", b"", (), None)
    call.pieces = []
    await call.run()
    assert (call.answer.status, call.answer.error["code"]) == (408, "request_timeout")


async def test_a_client_that_leaves_while_its_body_is_read_gets_nothing_and_costs_nothing():
    edge = Edge()
    call = Call(edge.app, "/v1/chat/completions", b"", (), None)
    call.pieces = []
    call.leave()
    await call.run()
    assert call.answer.status == 0
    assert edge.pipeline.requests == []
    assert edge.answers == [("/v1/chat/completions", 499)]


@pytest.mark.parametrize(
    "content_type", [b"application/json", b"application/json; charset=UTF-8", b"application/x+json"]
)
async def test_json_by_any_of_its_names_is_read(content_type: bytes):
    assert (await Edge().ask("/v1/chat/completions", chat_body(), (b"content-type", content_type))).status == 200


async def test_models():
    edge = Edge()
    listed = (await edge.ask("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == "m"
    assert (await edge.ask("/v1/models/m")).json() == listed["data"][0]
    answer = await edge.ask("/v1/models/org/other")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_health_and_readiness():
    assert (await Edge().ask("/healthz")).json() == {"status": "ok"}
    sick = Edge(health=Health(is_healthy=False, is_ready=False, detail="the engine is starting"))
    assert (await sick.ask("/healthz")).status == 503
    answer = await sick.ask("/readyz")
    assert (answer.status, answer.json()["detail"]) == (503, "the engine is starting")


async def test_the_page_may_load_nothing_but_this_server_s_own_code():
    for path in ("/", "/inspect", "/inspect/web/index.html"):
        answer = await Edge().ask(path)
        assert answer.status == 200
        policy = answer.headers[b"content-security-policy"].decode()
        assert "script-src 'self' 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='" in policy
    assert (await Edge().ask("/inspect/web/../../settings.py")).status == 404


async def test_a_caller_sees_the_records_of_its_own_key():
    edge = Edge(keys=KEYS)
    mine = (await edge.ask("/v1/chat/completions", chat_body(), BEARER)).headers[b"x-request-id"].decode()
    seen = await edge.ask(f"/inspect/requests/{mine}", None, BEARER)
    assert (seen.status, seen.json()["request_id"]) == (200, mine)
    other = await edge.ask(f"/inspect/requests/{mine}", None, (b"authorization", b"Bearer hs_other"))
    unknown = await edge.ask("/inspect/requests/none", None, BEARER)
    assert (other.status, other.error["message"]) == (404, unknown.error["message"])
    assert (await edge.ask("/inspect/requests?limit=7", None, BEARER)).json() == {"requests": [], "next_before": None}
    for limit in ("0", "1001", "x", "-1", ""):
        assert (await edge.ask(f"/inspect/requests?limit={limit}", None, BEARER)).error["param"] == "limit"
    assert (await edge.ask("/inspect/requests?" + "a&" * 20, None, BEARER)).status == 400


async def test_the_record_tells_the_caller_and_the_end():
    edge = Edge(keys=KEYS)
    await edge.ask("/v1/chat/completions", chat_body(n=99), BEARER)
    record = edge.flights.all[0].snapshot()
    assert [event["type"] for event in record["events"]] == ["received", "authenticated", "failed"]
    assert record["error"]["param"] == "n"
    await edge.ask("/v1/chat/completions", chat_body(), BEARER)
    record = edge.flights.all[1].snapshot()
    assert [event["type"] for event in record["events"]] == ["received", "authenticated", "parsed", "delivered"]
    assert edge.flights.num_open == 0


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"prompt": "ab", "add_special_tokens": False}, [97, 98]),
        ({"content": ""}, []),
        ({"messages": [{"role": "user", "content": "ab"}], "model": "m"}, [97, 98]),
    ],
)
async def test_tokenize(body: dict[str, Any], tokens: list[int]):
    assert (await Edge().ask("/tokenize", body)).json() == {"tokens": tokens, "count": len(tokens)}


async def test_tokenize_and_detokenize_refuse_what_they_do_not_understand():
    edge = Edge()
    for path, body, param in (
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "prompt"),
        ("/tokenize", {"content": "a", "x": 1}, "x"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}], "add_special": True}, "add_special"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ):
        answer = await edge.ask(path, body)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert (await edge.ask("/detokenize", {"tokens": [97, 98]})).json() == {"content": "ab", "prompt": "ab"}


async def test_an_unexpected_error_tells_nothing_and_is_logged_without_its_text(caplog: pytest.LogCaptureFixture):
    answer = await Edge(ValueError("prompt text PRIVATE")).chat()
    assert (answer.status, answer.error["code"], answer.error["type"]) == (500, "internal_error", "server_error")
    assert b"PRIVATE" not in answer.body
    assert "ValueError" in caplog.text
    assert "PRIVATE" not in caplog.text
