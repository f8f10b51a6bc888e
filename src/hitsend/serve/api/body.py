"""The request's body: read within limits, or refused before it is read.

Enters: ASGI `receive`. Leaves: bytes. Always true: never more than `max_body_bytes` is held (a larger Content-Length
is refused without reading, a chunked body at the byte that is one too many); a compressed or non-JSON body is refused
by its headers, so nothing is ever unpacked; a body that trickles in is cut off after `body_timeout_s`; a client that
leaves meanwhile is ClientGone. Next: `strict_json.py`.
"""

import asyncio

from hitsend.core.errors import ClientGone, InvalidRequest, RequestTimeout, RequestTooLarge, UnsupportedMediaType
from hitsend.serve.stream.deliver import Receive
from hitsend.settings import AccessSettings

Headers = dict[bytes, bytes]


async def read_json_body(receive: Receive, headers: Headers, limits: AccessSettings) -> bytes:
    """The whole body. Raises RequestTooLarge, UnsupportedMediaType, RequestTimeout, InvalidRequest, ClientGone."""
    _check_encoding(headers)
    _check_type(headers)
    _check_length(headers, limits.max_body_bytes)
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            return await _read(receive, limits.max_body_bytes)
    except TimeoutError as error:
        text = f"the body did not arrive within {limits.body_timeout_s:g} s (limit access.body_timeout_s)"
        raise RequestTimeout(text) from error


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left while its request was read")
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(f"more than {max_bytes}", max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _check_length(headers: Headers, max_bytes: int) -> None:
    given = headers.get(b"content-length")
    if given is None:
        return
    if not given.isdigit():
        raise InvalidRequest("the content-length header is not a number")
    if len(given) > 18 or int(given) > max_bytes:
        raise _too_large(given[:32].decode(), max_bytes)


def _too_large(size: str, max_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body has {size} bytes, limit {max_bytes} (access.max_body_bytes)")


def _check_encoding(headers: Headers) -> None:
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise UnsupportedMediaType("compressed bodies are not read: send it without content-encoding")


def _check_type(headers: Headers) -> None:
    given = headers.get(b"content-type")
    if given is None:
        return
    kind, _, rest = given.lower().partition(b";")
    kind = kind.strip()
    if kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
        raise UnsupportedMediaType("the content-type must be application/json")
    for parameter in rest.split(b";"):
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"charset" and value.strip().strip(b'"') not in (b"utf-8", b"utf8", b"us-ascii"):
            raise UnsupportedMediaType("the body's charset must be utf-8")
