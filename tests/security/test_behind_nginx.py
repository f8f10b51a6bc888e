"""The smuggling corpus through a real nginx: what it takes for one request is one here, and no victim gets another's
answer over the connections that all clients share behind it."""

import asyncio
import contextlib
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.security.sockets import Answer, answers, serving
from tests.security.test_smuggling import CHUNKED, GET, HEAD, ONE, REFUSED, SMUGGLED, keyed
from tests.served import free_port

pytestmark = pytest.mark.slow

NO_NGINX = "NO nginx ON THIS MACHINE: request smuggling behind a proxy is NOT tested"
WAIT_S = 20

MORE = {
    "smuggled in a body": HEAD + b"content-length: 35\r\n\r\n" + SMUGGLED,
    "smuggled in a chunk": CHUNKED + b"23\r\n" + SMUGGLED + b"\r\n0\r\n\r\n",
    "a body that is longer than it says": HEAD + b"content-length: 3\r\n\r\nabc",
    "a body that never ends": HEAD + b"content-length: 4000\r\n\r\nabc",
    "a chunk that never ends": CHUNKED + b"fff\r\nabc",
    "a length hidden by connection": HEAD + b"connection: content-length\r\ncontent-length: 35\r\n\r\n",
    "a coding hidden by connection": CHUNKED[:-2] + b"connection: transfer-encoding\r\n\r\n0\r\n\r\n",
    "a TE header": HEAD + b"te: trailers, chunked\r\ncontent-length: 35\r\n\r\n",
    "a client that asks for keep-alive and close": GET + b"connection: keep-alive, close\r\n\r\n",
    "expect": HEAD + b"expect: 100-continue\r\ncontent-length: 35\r\n\r\n",
}


def config(folder: Path, front: int, back: int, *, buffers: bool) -> Path:
    """Connections to hitsend are kept and shared, which is what makes a desync somebody else's loss."""
    found = folder / "nginx.conf"
    temporary = "".join(
        f"  {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    found.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        "events { worker_connections 256; }\nhttp {\n"
        f"{temporary}  underscores_in_headers on;\n  ignore_invalid_headers off;\n"
        f"  log_format seen '$request_method $uri $upstream_addr';\n  access_log {folder}/access.log seen;\n"
        f"  upstream hitsend {{ server 127.0.0.1:{back}; keepalive 2; }}\n"
        f"  server {{ listen 127.0.0.1:{front}; location / {{\n"
        "    proxy_pass http://hitsend;\n    proxy_http_version 1.1;\n    proxy_set_header connection '';\n"
        f"    proxy_request_buffering {'on' if buffers else 'off'};\n    proxy_next_upstream off;\n"
        "  } }\n}\n"
    )
    return found


@contextlib.asynccontextmanager
async def nginx(folder: Path, back: int, *, buffers: bool):
    """Its port."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        print(f"\n{NO_NGINX}", file=sys.stderr, flush=True)
        pytest.skip(NO_NGINX)
    front = free_port()
    words = [program, "-c", str(config(folder, front, back, buffers=buffers)), "-p", str(folder)]
    words += ["-e", str(folder / "error.log")]
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                with contextlib.suppress(OSError):
                    (await asyncio.open_connection("127.0.0.1", front))[1].close()
                    break
                assert process.returncode is None, (folder / "error.log").read_text()
                await asyncio.sleep(0.02)
        yield front
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(WAIT_S):
            await process.wait()


async def attack(port: int, raw: bytes) -> None:
    """Send it, take whatever comes, leave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw)
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        async with asyncio.timeout(0.05):
            while await reader.read(65536):
                pass
    writer.close()


async def victim(port: int, name: str) -> Answer:
    """An honest request of somebody else, with an id of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nx-request-id: %s\r\nconnection: close\r\n\r\n" % name.encode()
    writer.write(head)
    try:
        (answer,) = answers(await reader.read())
    finally:
        writer.close()
    return answer


@pytest.mark.parametrize("buffers", [True, False])
async def test_nginx_and_hitsend_see_the_same_requests(tmp_path, buffers):
    edge, seen = keyed(), Counter()

    async def app(scope, receive, send):
        seen[f"{scope['method']} {scope['path']}"] += 1
        await edge.app(scope, receive, send)

    corpus = REFUSED | ONE | MORE
    async with serving(app) as back, nginx(tmp_path, back, buffers=buffers) as front, asyncio.timeout(90):
        for number, (name, raw) in enumerate(corpus.items()):
            await attack(front, raw + SMUGGLED)
            for again in range(2):  # one for each connection that nginx may have kept
                mine = f"victim-{number}-{again}"
                answer = await victim(front, mine)
                assert answer.status == 401, (name, answer.head)
                assert answer.header(b"x-request-id") == mine.encode(), name
    log = [line.split() for line in (tmp_path / "access.log").read_text(errors="replace").splitlines()]
    forwarded = Counter(f"{method} {uri}" for method, uri, *at in log if at and at[0] != "-")
    assert forwarded["GET /v1/models"] >= 2 * len(corpus)
    more = {request: times - forwarded[request] for request, times in seen.items() if times > forwarded[request]}
    assert more == {}, "hitsend saw requests that nginx never sent"
