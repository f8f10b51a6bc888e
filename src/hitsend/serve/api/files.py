"""`/v1/files`: what batches are made from, and what they leave behind.

Enters: authenticated exchanges. Leaves: OpenAI's file objects, and bytes. Always true: an upload goes to the disk as it
comes, within `batches.max_file_bytes`, what the key may store, and a time for every MiB; what isn't whole leaves
nothing behind; what is in a file is nobody's business until a batch reads it. Next: `batches.py`.
"""

import asyncio
import os
from contextlib import suppress
from typing import Any, BinaryIO

import msgspec

from hitsend.core.errors import (
    ClientGone,
    InsufficientQuota,
    InvalidRequest,
    NotFound,
    RequestTimeout,
    RequestTooLarge,
    StorageFailed,
    UnsupportedMediaType,
)
from hitsend.serve.api.exchange import Exchange
from hitsend.serve.api.multipart import Form, boundary_of
from hitsend.serve.api.queries import query_of, read_limit
from hitsend.serve.api.services import BatchServices
from hitsend.serve.usage.files import DAY_S, FileStore, StoredFile, whose

MIB = 1024 * 1024
OVERHEAD_BYTES = 16 * 1024
"""What the form around a file may have."""
WRITE_BYTES = 256 * 1024
PURPOSE = "batch"
MAX_LISTED = 10_000
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
MIN_LIFE_S = 3600


def batch_services(exchange: Exchange) -> BatchServices:
    """Raises NotFound where the server keeps none."""
    if exchange.services.batches is None:
        raise NotFound("this server keeps no files and runs no batches")
    return exchange.services.batches


async def create(exchange: Exchange) -> None:
    """Keep an uploaded file. Raises what has to become an HTTP status."""
    files = batch_services(exchange).files
    boundary = _check_head(exchange, files.settings.max_file_bytes)
    async with files.receiving(exchange.principal.key_id):
        row = await _take(exchange, files, boundary)
    await exchange.answer_json(shown(row))


async def _take(exchange: Exchange, files: FileStore, boundary: bytes) -> StoredFile:
    try:
        file_id, opened = files.create()
    except OSError as error:
        raise StorageFailed("the server can't keep files now", retry_after_s=1.0) from error
    is_kept = False
    try:
        with opened:
            upload = _Upload(opened, files.settings.max_file_bytes)
            form = Form(boundary, upload.take)
            await _receive(exchange, form, upload)
        purpose, life_s = _purpose(form), _life_s(form, files.settings.retention_days * DAY_S)
        row = files.new_row(file_id, exchange.principal.key_id, purpose, form.file_name or "", upload.num_bytes)
        row = msgspec.structs.replace(row, expires_at=row.created_at + life_s)
        is_kept = True  # from here on a row may stand, whatever happens: then only the sweep may judge
        try:
            await files.add(row)
        except InsufficientQuota:
            is_kept = False
            raise
    finally:
        if not is_kept:
            files.discard(file_id)
    return row


async def list_files(exchange: Exchange) -> None:
    """The caller's files, a page at a time."""
    query = query_of(exchange, ("limit", "order", "after", "purpose"))
    limit = read_limit(query, default=MAX_LISTED, most=MAX_LISTED)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: expected asc or desc", param="order")
    found = await batch_services(exchange).files.page(
        whose(exchange.principal),
        limit=limit + 1,
        after=query.get("after"),
        purpose=query.get("purpose"),
        newest=order == "desc",
    )
    await exchange.answer_json(page([shown(row) for row in found[:limit]], has_more=len(found) > limit))


async def retrieve(exchange: Exchange) -> None:
    """What is known of a file."""
    await exchange.answer_json(
        shown(await batch_services(exchange).files.get(exchange.param, whose(exchange.principal)))
    )


async def delete(exchange: Exchange) -> None:
    """Forget a file that no running batch reads."""
    await batch_services(exchange).files.delete(exchange.param, whose(exchange.principal))
    await exchange.answer_json({"id": exchange.param, "object": "file", "deleted": True})


async def content(exchange: Exchange) -> None:
    """The bytes of a file."""
    files = batch_services(exchange).files
    row = await files.get(exchange.param, whose(exchange.principal))
    try:
        opened = await asyncio.to_thread(files.path(row.file_id).open, "rb")
    except OSError as error:
        raise StorageFailed("the file can't be read on this server") from error
    headers = [(b"content-type", b"application/octet-stream"), (b"x-content-type-options", b"nosniff")]
    headers.append((b"content-length", str(row.num_bytes).encode()))
    stall_s = exchange.services.stream.stall_s
    with opened:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        with suppress(TimeoutError):  # a client that reads nothing: the connection ends short of its length
            while exchange.method != "HEAD" and (piece := await asyncio.to_thread(opened.read, WRITE_BYTES)):
                async with asyncio.timeout(stall_s):
                    await exchange.send({"type": "http.response.body", "body": piece, "more_body": True})
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})


def shown(row: StoredFile) -> dict[str, Any]:
    """OpenAI's file object."""
    return {
        "id": row.file_id,
        "object": "file",
        "bytes": row.num_bytes,
        "created_at": int(row.created_at),
        "expires_at": int(row.expires_at),
        "filename": row.file_name,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
    }


def page(data: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """OpenAI's list."""
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}


class _Upload:
    """The file's bytes on their way to the disk, some at a time."""

    def __init__(self, opened: BinaryIO, most: int) -> None:
        self.num_bytes = 0
        self._opened = opened
        self.most = most
        self._waiting = bytearray()

    def take(self, piece: bytes) -> None:
        """The next bytes. Raises RequestTooLarge."""
        self.num_bytes += len(piece)
        if self.num_bytes > self.most:
            raise _too_large(f"more than {self.most}", self.most)
        self._waiting += piece

    async def flush(self, *, is_last: bool = False) -> None:
        """Write what is worth it; all of it, and down to the disk, at the end. Raises StorageFailed."""
        if len(self._waiting) < WRITE_BYTES and not is_last:
            return
        writing, self._waiting = self._waiting, bytearray()
        try:
            await asyncio.to_thread(self._write, writing, is_last)
        except OSError as error:
            raise StorageFailed("the file can't be written now", retry_after_s=1.0) from error

    def _write(self, piece: bytearray, is_last: bool) -> None:  # noqa: FBT001  # by position only, into the thread
        self._opened.write(piece)
        if is_last:
            self._opened.flush()
            os.fsync(self._opened.fileno())


async def _receive(exchange: Exchange, form: Form, upload: _Upload) -> None:
    limit_s, loop = exchange.services.access.body_timeout_s, asyncio.get_running_loop()
    began, num_bytes, most = loop.time(), 0, upload.most + OVERHEAD_BYTES
    try:
        async with asyncio.timeout(limit_s) as patience:
            while True:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left while its file was read")
                body = message.get("body", b"")
                num_bytes += len(body)
                if num_bytes > most:
                    raise _too_large(f"more than {most}", upload.most)
                form.feed(body)
                await upload.flush()
                patience.reschedule(began + limit_s * (1 + num_bytes // MIB))
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        text = f"the file did not arrive at a MiB within {limit_s:g} s (limit access.body_timeout_s)"
        raise RequestTimeout(text) from error
    form.end()
    await upload.flush(is_last=True)


def _check_head(exchange: Exchange, most: int) -> bytes:
    """The boundary. Raises UnsupportedMediaType, InvalidRequest, RequestTooLarge."""
    headers = exchange.headers
    if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
        raise UnsupportedMediaType("compressed bodies are not read: send it without content-encoding")
    given = headers.get(b"content-length")
    if given is not None and not given.isdigit():
        raise InvalidRequest("the content-length header is not a number")
    if given is not None and (len(given) > 18 or int(given) > most + OVERHEAD_BYTES):
        raise _too_large(given[:32].decode(), most)
    return boundary_of(headers.get(b"content-type"))


def _too_large(size: str, most: int) -> RequestTooLarge:
    return RequestTooLarge(f"file: {size} bytes, limit {most} (batches.max_file_bytes)", param="file")


def _purpose(form: Form) -> str:
    """Raises InvalidRequest, also for a field that isn't known."""
    for name in form.fields:
        if name != "purpose" and name not in (ANCHOR, SECONDS):
            raise InvalidRequest(f"{name}: unknown field; a file has `purpose` and `file`", param=name)
    purpose = form.fields.get("purpose")
    if purpose != PURPOSE:
        found = "is missing" if purpose is None else f"is {purpose[:64]!r}"
        raise InvalidRequest(f"purpose: {found}, only {PURPOSE!r} is served", param="purpose")
    return purpose


def _life_s(form: Form, most: int) -> int:
    """How long it is kept: as asked, or as long as files are kept here. Raises InvalidRequest."""
    given = form.fields.get(SECONDS)
    if form.fields.get(ANCHOR, "created_at") != "created_at":
        raise InvalidRequest(f"{ANCHOR}: only 'created_at' is supported", param=ANCHOR)
    if given is None:
        return most
    if not given.isascii() or not given.isdigit() or len(given) > 9 or not MIN_LIFE_S <= int(given) <= most:
        limits = f"{MIN_LIFE_S} to {most} (batches.retention_days)"
        raise InvalidRequest(f"{SECONDS}: {given[:32]!r}, limit {limits}", param=SECONDS)
    return int(given)
