"""A real server in this process, real but for its model, and a client that speaks of files and batches."""

import asyncio
import contextlib
import io
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn

from hitsend.serve.api.routes import Routes
from hitsend.serve.app import built
from hitsend.serve.stream.connection import Connection
from hitsend.settings_source import load
from tests.drills.scripted import STOP, scripted

URL = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = URL, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60, "stop": [STOP]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | fields}


def raw(*lines: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(each).encode() for each in lines)


class Client:
    """One caller."""

    def __init__(self, session: aiohttp.ClientSession, base: str, key: str | None = None) -> None:
        self._session = session
        self._base = base
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def of(self, key: str) -> "Client":
        return Client(self._session, self._base, key)

    async def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the answer's JSON (or its bytes)."""
        form = {"data": body} if isinstance(body, aiohttp.FormData | bytes) else {"json": body}
        given = self._headers | (headers or {})
        async with self._session.request(method, self._base + path, headers=given, **form) as answer:
            content = await answer.read()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(content) if is_json else content

    async def upload(self, content: bytes, **fields: str) -> tuple[int, Any]:
        form = aiohttp.FormData({"purpose": "batch"} | fields)
        form.add_field("file", io.BytesIO(content), filename="in.jsonl")
        return await self.ask("POST", "/v1/files", form)

    async def stream(self, pieces: AsyncIterator[bytes]) -> int:
        """The status of an upload that comes piece by piece."""
        headers = self._headers | {"Content-Type": "multipart/form-data; boundary=x"}
        async with self._session.post(f"{self._base}/v1/files", data=pieces, headers=headers) as answer:
            return answer.status

    async def create(self, file_id: str, **fields: Any) -> tuple[int, Any]:
        body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h"} | fields
        return await self.ask("POST", "/v1/batches", body)

    async def begin(self, *lines: dict[str, Any], **fields: Any) -> Any:
        """A batch that has to be taken."""
        status, file = await self.upload(raw(*lines))
        assert status == 200, file
        status, batch = await self.create(file["id"], **fields)
        assert status == 200, batch
        return batch

    async def until(self, batch: Any, good: Any = lambda batch: batch["status"] in ENDS) -> Any:
        """The batch when it is as wanted."""
        async with asyncio.timeout(20):
            while not good(batch):
                await asyncio.sleep(0.02)
                batch = (await self.ask("GET", f"/v1/batches/{batch['id']}"))[1]
        return batch

    async def lines(self, file_id: str | None) -> list[Any]:
        """What is in a file."""
        if file_id is None:
            return []
        status, content = await self.ask("GET", f"/v1/files/{file_id}/content")
        assert status == 200
        return [json.loads(each) for each in content.splitlines()]


@contextlib.asynccontextmanager
async def batching(folder: Any, **flags: str) -> AsyncIterator[Client]:
    """A server on that folder for the length of the block."""
    given = {"server.data_dir": str(folder), "engine.alias": "scripted", "engine.context": "512"}
    settings = load(flags=given | {name.replace("__", "."): value for name, value in flags.items()}).settings
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with built(settings, scripted(lambda _: None)) as services:
            config = uvicorn.Config(Routes(services), http=Connection, ws="none", lifespan="off", log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server._serve(sockets=[listening]))
            async with aiohttp.ClientSession() as session:
                yield Client(session, f"http://127.0.0.1:{listening.getsockname()[1]}")
            server.should_exit = True
            await serving
