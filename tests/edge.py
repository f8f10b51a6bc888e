"""A scripted pipeline behind the real routes, driven over ASGI without a server."""

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Callable
from typing import Any

from hitsend.core.clock import SystemClock
from hitsend.core.embedding import Embedded, EmbeddingRequest
from hitsend.core.errors import InvalidApiKey, InvalidRequest, StorageFailed
from hitsend.core.events import LimitCheck, TokenSpan
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Delta, Principal, Request, Started, Usage
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.api.routes import Routes
from hitsend.serve.api.services import Health, PageFile, ServedModel, Services
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.usage.record_search import EVERY, Percentiles, RecordFilter
from hitsend.settings import AccessSettings, ServerSettings, StreamSettings

LOCAL = (b"host", b"127.0.0.1:8000")
JSON = (b"content-type", b"application/json")
STARTED = Started(request_id="r", created=1_700_000_000, model="m")
COMPLETED = Completed(
    usage=Usage(prompt_tokens=7, completion_tokens=3), cost_microusd=12, timings={"wall_ms": 5.0}, warnings=("w",)
)


def text(piece: str, index: int = 0) -> Delta:
    return Delta(index=index, text=piece)


def end(index: int = 0, reason: FinishReason = FinishReason.STOP, matched: str | None = None) -> Delta:
    return Delta(index=index, finish_reason=reason, matched_stop=matched)


class Wait:
    """A place where the script stops until `event` is set (for ever, if nobody sets it)."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.event = asyncio.Event()


class ScriptedPipeline:
    """Yields what the script says (without one: `hi` for every choice); a Wait pauses, an exception is raised.

    `endings` says how each run was left.
    """

    def __init__(self, *script: Any, clean_up_s: float = 0.0) -> None:
        self.script = script
        self.clean_up_s = clean_up_s
        self.clean_up_error: Exception | None = None
        self.requests: list[Request] = []
        self.endings: list[str] = []

    def __call__(self, request: Request, flight: Flight) -> AsyncGenerator[Any, None]:
        self.requests.append(request)
        choices = (
            piece
            for index in range(request.n * max(1, len(request.prompts)))
            for piece in (text("hi", index), end(index))
        )
        usual = (STARTED, *choices, COMPLETED)
        return self._run(flight, self.script or usual)

    async def _run(self, flight: Flight, script: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        ending = "finished"
        try:
            for item in script:
                if isinstance(item, Wait):
                    item.reached.set()
                    await item.event.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
            flight.enter(State.PREPARED)
            for state in (State.RESERVED, State.RUNNING, State.FINISHED):
                flight.enter(state)
        except asyncio.CancelledError:
            ending = "cancelled"
            raise
        except GeneratorExit:
            ending = "closed"
            raise
        except BaseException:
            ending = "failed"
            raise
        finally:
            if self.clean_up_s:
                await asyncio.sleep(self.clean_up_s)
            self.endings.append(ending)
            if self.clean_up_error is not None:
                raise self.clean_up_error


class FakeAuth:
    def __init__(self, keys: dict[str, Principal] | None = None) -> None:
        self.keys = keys or {}

    @property
    def are_keys_required(self) -> bool:
        return bool(self.keys)

    def authenticate(self, authorization: str | None, client_host: str | None) -> Principal:
        if not self.keys:
            return Principal()
        principal = self.keys.get((authorization or "").removeprefix("Bearer "))
        if principal is None:
            raise InvalidApiKey("missing or wrong API key")
        return principal


class KeptFlights:
    def __init__(self) -> None:
        self.all: list[Flight] = []
        self.num_open = 0

    def open(self, request_id: str, principal: Principal, traceparent: str | None = None) -> Flight:
        flight = Flight(request_id, SystemClock())
        flight.principal = principal
        self.all.append(flight)
        self.num_open += 1
        return flight

    def close(self, flight: Flight) -> None:
        self.num_open -= 1
        flight.close()

    async def get(self, request_id: str) -> bytes | None:
        for flight in self.all:
            if flight.request_id == request_id:
                return json.dumps(flight.snapshot()).encode()
        return None

    async def list(self, limit: int, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> tuple[Any, ...]:
        return ()

    async def percentiles(self, *, key_id: str | None = None, wanted: RecordFilter = EVERY) -> Percentiles:
        return Percentiles(0, (), ())

    def under_way(self, key_id: str | None = None) -> tuple[Flight, ...]:
        return tuple(f for f in self.all if not f.is_closed and key_id in (None, f.principal.key_id))


class KeptResponses:
    """Stored responses in memory; `fails` makes writing impossible."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str | None], bytes] = {}
        self.fails = False

    async def get(self, response_id: str, *, key_id: str | None) -> bytes | None:
        return self.rows.get((response_id, key_id))

    async def put(self, response_id: str, body: bytes, *, key_id: str | None) -> None:
        if self.fails:
            raise StorageFailed("the database did not take the write")
        self.rows[response_id, key_id] = body

    async def delete(self, response_id: str, *, key_id: str | None) -> bool:
        return self.rows.pop((response_id, key_id), None) is not None


class LetterText:
    def vocabulary_of(self, model: str) -> Vocabulary | None:
        return Vocabulary(tuple(chr(letter).encode() for letter in range(128)))

    async def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, model: str | None = None
    ) -> tuple[int, ...]:
        return tuple(map(ord, text))

    async def prepare(self, request: Request, *, wants_text: bool = False) -> Prompt:
        ids = await self.tokenize_chat(request)
        spans = (TokenSpan(0, "user", 0, len(ids)),)
        shown = "".join(map(chr, ids)) if wants_text else None
        return Prompt(ids, len(ids), 0, spans, len(ids), "sha", 0.0, 0.0, 0.0, 0.0, shown)

    async def tokenize_chat(self, request: Request) -> tuple[int, ...]:
        return tuple(ord(char) for message in request.messages for char in message.content or "")

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str | None = None) -> str:
        if any(not 0 <= token < 0xD800 for token in token_ids):
            raise InvalidRequest("an id outside the vocabulary", param="tokens")
        return "".join(map(chr, token_ids))


class Edge:
    """The routes over fakes. `answers` counts what was observed, as (route, status)."""

    def __init__(
        self,
        *script: Any,
        keys: dict[str, Principal] | None = None,
        access: AccessSettings | None = None,
        stream: StreamSettings | None = None,
        server: ServerSettings | None = None,
        clean_up_s: float = 0.0,
        health: Health | None = None,
        stores_responses: bool = True,
        embedding_model: ServedModel | None = None,
    ) -> None:
        self.pipeline = ScriptedPipeline(*script, clean_up_s=clean_up_s)
        self.flights = KeptFlights()
        self.embedded: list[EmbeddingRequest] = []
        self.answers: list[tuple[str, int]] = []
        self.responses = KeptResponses()
        self.services = Services(
            clock=SystemClock(),
            server=server or ServerSettings(),
            access=access or AccessSettings(),
            stream=stream or StreamSettings(),
            auth=FakeAuth(keys),
            flights=self.flights,
            pipeline=self.pipeline,
            text=LetterText(),
            records=self.flights,
            models=lambda: (ServedModel(id="m", created=1, context=2048),),
            state=lambda: {"running": 0},
            health=lambda: health or Health(is_healthy=True, is_ready=True),
            render_metrics=lambda _is_openmetrics: ("text/plain", b"up 1\n"),
            observe_http=lambda route, status, _: self.answers.append((route, status)),
            embed=self._embed,
            embedding_model=embedding_model,
            estimate=self._estimate,
            page={"index.html": PageFile("text/html", b"<script>1</script>")},
            suited=lambda request: request,
            responses=self.responses if stores_responses else None,
        )
        self.app = Routes(self.services)

    async def _estimate(self, request: Request, limits: tuple[LimitCheck, ...]) -> Any:
        """What it was asked, as its answer."""
        return {"model": request.model, "n": request.n, "limits": limits}

    async def _embed(self, request: EmbeddingRequest, flight: Flight) -> Embedded:
        """Vectors (0.0, -2.5) for every input."""
        self.embedded.append(request)
        for state in (State.PREPARED, State.RESERVED, State.RUNNING, State.FINISHED):
            flight.enter(state)
        return Embedded((struct.pack("<2f", 0.0, -2.5),) * len(request.inputs), Usage(prompt_tokens=5), 3, {})

    async def ask(
        self, path: str, body: Any = None, *headers: tuple[bytes, bytes], method: str | None = None
    ) -> "Answer":
        call = Call(self.app, path, body, headers, method)
        await call.run()
        return call.answer

    async def chat(self, **fields: Any) -> "Answer":
        return await self.ask("/v1/chat/completions", chat_body(**fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields


class Answer:
    """What came back. `body` grows while it comes."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_complete = False

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error, or Anthropic's with the type as its code."""
        found: dict[str, Any] = self.json()["error"]
        if self.json().get("type") == "error":
            assert set(found) == {"type", "message"}
            assert self.json()["request_id"] == self.headers[b"request-id"].decode()
            return {"code": found["type"]} | found
        assert set(found) == {"message", "type", "param", "code"}
        return found


class Call:
    """One request. `leave()` is the client hanging up; `accept` may block or raise, as a socket would."""

    def __init__(
        self, app: Any, path: str, body: Any, headers: tuple[tuple[bytes, bytes], ...], method: str | None
    ) -> None:
        self.app = app
        raw = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
        own = dict(headers)
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method or ("GET" if body is None else "POST"),
            "path": path.partition("?")[0],
            "query_string": path.partition("?")[2].encode(),
            "headers": [*(one for one in (LOCAL, JSON) if one[0] not in own), *headers],
            "client": ("127.0.0.1", 5),
        }
        self.pieces: list[bytes] = [raw]
        self.answer = Answer()
        self.gone = asyncio.Event()
        self.accept: Callable[[bytes], Any] | None = None

    def leave(self) -> None:
        self.gone.set()

    async def receive(self) -> dict[str, Any]:
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        answer = self.answer
        assert not answer.is_complete
        if message["type"] == "http.response.start":
            assert answer.status == 0
            answer.status = message["status"]
            answer.headers = dict(message["headers"])
            assert b"x-request-id" in answer.headers
            return
        assert answer.status
        if self.accept is not None:
            await self.accept(message["body"])
        answer.body += message["body"]
        answer.is_complete = not message["more_body"]

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.app(self.scope, self.receive, self.send)
