"""No Host header, no header of a proxy and no way to write a target opens a route without a key."""

import itertools

import pytest

from hitsend.core.request import Principal
from hitsend.serve.api.routes import ROUTES
from tests.api.test_admin import admin
from tests.edge import Edge
from tests.security.sockets import say_all, serving

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

EVERY = [(route.replace("{id}", "x"), method) for route, handlers in ROUTES.items() for method in handlers]
HEALTHY = b'{"status":"ok"}'

PIECES = [
    *(
        "/",
        "?",
        "#",
        "@",
        " ",
        "\t",
        "\\",
        "%",
        "%00",
        "%2f",
        "%0d%0a",
        ",",
        ";",
        ":",
        "::",
        ":0",
        ":65536",
        ":-1",
        ":+80",
    ),
    *(
        ":80:80",
        ":0x50",
        ":\uff18\uff10",
        "..",
        ".",
        "[",
        "]",
        "[]",
        "'",
        '"',
        "<",
        ">",
        "`",
        "{",
        "}",
        "|",
        "^",
        "~",
        "&",
    ),
    *("=", "$", "*", "\xe9", "\uff0e", "\u202e", "\x80", "\x7f", "/healthz", "/healthz?", "/healthz#", "?/healthz"),
    *("#/healthz", "@/healthz", "u:p@", "\\@", "%20", "_", "-", "a" * 254, "a" * 5000),
]
HOSTS = [
    *(
        "",
        "/healthz",
        "http://127.0.0.1",
        "[::1",
        "::1",
        "[::1%25lo]",
        "[::ffff:127.0.0.1]",
        "0",
        "127.1",
        "0x7f000001",
    ),
    *(f"{piece}127.0.0.1" for piece in PIECES),
    *(f"localhost{piece}" for piece in PIECES),
    *(f"a{piece}b" for piece in PIECES),
]
HEADERS = [
    *(f"host: {host}\r\n" for host in HOSTS),
    *("", "host: a\r\nhost: a\r\n", "host: 127.0.0.1\r\nhost: /healthz\r\n", "host:127.0.0.1\r\nHost: b\r\n"),
    *(
        f"host: 127.0.0.1\r\n{name}: {value}\r\n"
        for name, value in itertools.product(
            (
                *("x-forwarded-host", "x-forwarded-for", "x-forwarded-path", "x-forwarded-prefix", "x-original-url"),
                *("x-rewrite-url", "x-forwarded-uri", "x-http-method-override", "forwarded", "x-real-ip", "referer"),
            ),
            ("/healthz", "127.0.0.1"),
        )
    ),
]
TARGETS = [
    *("http://evil.example{}", "http://u:p@evil.example{}", "https://127.0.0.1:1{}", "ftp://a{}", "http:///a{}"),
    *(
        "//healthz{}",
        "/healthz/..{}",
        "/healthz%2f..{}",
        "/healthz;{}",
        "{};/healthz",
        "{}%00",
        "{}%2e",
        "/.{}",
        "/%2e{}",
    ),
    *("{}/", "{}/healthz", "{}?/healthz", "{}#/healthz", "{}%3f/healthz", "{}%23/healthz", "{}/..;/healthz"),
    *("{}/%2e%2e/healthz", "{}\\..\\healthz", "http://healthz?{}", "http://a/healthz{}", "http://a@/healthz{}", "*{}"),
    *("{}%0d%0ax:y", "{}?a=b&/healthz"),
]


def request(method: str, target: str, headers: str) -> bytes:
    return f"{method} {target} HTTP/1.1\r\n{headers}content-length: 0\r\n\r\n".encode("utf-8", "surrogateescape")


def test_there_are_two_hundred():
    assert len(set(HEADERS)) >= 200


async def check(app, attacks: list[list[tuple[str, bytes]]]) -> int:
    """Send each list in a row; nothing may be answered with 2xx but what `/healthz` says, nothing may break."""
    num_refused = 0
    async with serving(app) as port:
        for attack in attacks:
            came = await say_all(port, [raw for _, raw in attack])
            for (path, raw), answer in zip(attack, came, strict=True):
                if 200 <= answer.status < 300:
                    assert answer.body == HEALTHY or path == "/healthz", raw
                else:
                    assert 400 <= answer.status < 500, (raw, answer.head)
                    num_refused += 1
    return num_refused


async def test_two_hundred_hosts_on_every_route_without_a_key(tmp_path):
    async with admin(tmp_path) as opened:
        attacks = [[(path, request(method, path, headers)) for path, method in EVERY] for headers in HEADERS]
        num_refused = await check(opened.app, attacks)
        assert num_refused >= len(HEADERS) * (len(EVERY) - 1)
        assert len(await opened.keys.list()) == 1


async def test_no_way_to_write_a_target_opens_a_route(tmp_path):
    headers = "host: 127.0.0.1\r\n"
    async with admin(tmp_path) as opened:
        attacks = [
            [(path, request(method, target.format(path), headers)) for path, method in EVERY] for target in TARGETS
        ]
        await check(opened.app, attacks)
        assert len(await opened.keys.list()) == 1


@pytest.mark.parametrize("header", ["forwarded", "via", "x-forwarded-for", "x-real-ip", "cf-connecting-ip"])
async def test_who_comes_through_a_proxy_is_not_the_owner_of_the_machine(header):
    edge = Edge()
    for path, method in EVERY:
        answer = await edge.ask(
            path, {} if method in ("POST", "PATCH") else None, (header.encode(), b"1.2.3.4"), method=method
        )
        assert answer.status == (200 if path == "/healthz" else 403)
    keyed = Edge(keys={"k": Principal(key_id="k", name="n")})
    bearer = (b"authorization", b"Bearer k")
    assert (await keyed.ask("/v1/models", None, (header.encode(), b"1.2.3.4"), bearer)).status == 200
