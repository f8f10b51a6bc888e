"""The edge's side of the text child: prompts are asked for here, and the child is restarted when it had to die.

Enters: requests and texts. Leaves: prompts and ids. Always true: the child works on one order at a time and no other is
in its hands, so when it dies exactly that one fails and all others wait for the next child; the event loop only packs
and unpacks messages; an order whose caller has gone is never sent. Next: `budget.py`.
"""

import asyncio
import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.constraint import GrammarSource
from hitsend.core.errors import (
    ConfigError,
    EngineFailed,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    ServeError,
    ServerOverloaded,
    from_code,
)
from hitsend.core.request import Request
from hitsend.core.vocabulary import OTHER_FILE, Vocabulary
from hitsend.serve.chat.checkpoint import CheckpointFiles
from hitsend.serve.chat.grammars import CheckGrammar, Grammar, GrammarCache, end_reason, grammar_key
from hitsend.serve.chat.prompt import (
    Answer,
    NotOpened,
    Open,
    Opened,
    Order,
    Prepare,
    Prompt,
    Refused,
    TextFacts,
    TokenIds,
    TokenizeText,
)
from hitsend.serve.chat.tool_prompt import offered_tools
from hitsend.serve.child import Child, ChildExit, ChildGone
from hitsend.settings import ChatSettings

MAX_WAITING = 4096
MAX_WAITING_BYTES = 256 * 1024 * 1024
START_TIMEOUT_S = 60.0
_LONGEST_PAUSE_S = 5.0
_log = logging.getLogger(__name__)


class _Job(msgspec.Struct, eq=False):
    """One order on its way."""

    body: bytes
    answer: "asyncio.Future[Prompt | TokenIds | Grammar]"
    grammar: GrammarSource | None = None


class TextChild:
    """Renders and tokenises for one model. Build it with paths and settings, then `start`.

    Without a path it stays away, for a server whose models all run elsewhere: who asks it is told so. With `checkpoint`
    it has no vocabulary, and counts prompts of a model elsewhere.
    """

    def __init__(
        self,
        model_path: str | None,
        settings: ChatSettings,
        *,
        libllama: str | None = None,
        checkpoint: CheckpointFiles | None = None,
    ) -> None:
        self._model_path = model_path
        self._libllama = libllama
        self._checkpoint = checkpoint
        self._settings = settings
        self._template: str | None = None
        self._child: Child | None = None
        self._waiting: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._current: _Job | None = None
        self._backstop: asyncio.TimerHandle | None = None
        self._is_open = False
        self._is_stopping = False
        self._opened: asyncio.Future[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._failures = 0
        self._facts: TextFacts | None = None
        self._vocabulary: Vocabulary | None = None
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._grammars = GrammarCache()
        self.restarts = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's table. Raises EngineUnavailable before the first start."""
        if self._vocabulary is None:
            raise self._away()
        return self._vocabulary

    @property
    def facts(self) -> TextFacts:
        """Metadata and template. Raises EngineUnavailable before the first start."""
        if self._facts is None:
            raise self._away()
        return self._facts

    @property
    def metadata(self) -> dict[str, str]:
        """The checkpoint's metadata, every value as text."""
        return self.facts.metadata

    @property
    def pid(self) -> int | None:
        """The child, while there is one."""
        return self._child.pid if self._child is not None else None

    async def start(self) -> None:
        """Start the child and read the vocabulary. Raises ConfigError or EngineUnavailable."""
        if self._model_path is None:
            return
        self._template = self._read_template()
        self._is_stopping = False
        self._opened = asyncio.get_running_loop().create_future()
        await self._spawn()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await asyncio.shield(self._opened)
        except TimeoutError:
            await self.stop()
            raise EngineUnavailable(f"the text process was not ready within {START_TIMEOUT_S:g} s") from None
        except (ServeError, ConfigError):
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the child; whoever waits gets an error. Safe to call twice."""
        self._is_stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
            self._restarting = None
        if self._child is not None:
            await self._child.stop()
            self._child = None
        self._fail_all(EngineUnavailable("the text process has been stopped"))

    async def prepare(
        self,
        request: Request,
        *,
        wants_text: bool = False,
        max_prompt_tokens: int | None = None,
        tools: tuple[dict[str, Any], ...] | None = None,
        only_counts: bool = False,
    ) -> Prompt:
        """The request's prompt. `tools`: in place of those that are offered to a model here. `only_counts`: see
        `Prepare`.

        Raises InvalidRequest, EngineError (any of its three) or ServerOverloaded.
        """
        order = Prepare(
            messages=request.messages,
            template_kwargs=request.template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            wants_text=wants_text,
            max_prompt_tokens=max_prompt_tokens,
            tools=offered_tools(request) if tools is None else tools,
            only_counts=only_counts,
        )
        answer = await self._ask(order, "messages")
        if not isinstance(answer, Prompt):
            raise EngineFailed("the text process gave another answer than was asked for")
        return answer

    async def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> tuple[int, ...]:
        """Ids of a text. Unless asked for, control spellings stay text and nothing is added. Raises as `prepare`."""
        limit = self._settings.max_prompt_bytes
        if len(text) > limit or len(text.encode("utf-8", "replace")) > limit:
            raise InvalidRequest(f"the text is longer than {limit} bytes (chat.max_prompt_bytes)", param="prompt")
        answer = await self._ask(TokenizeText(text, add_special, parse_special), "prompt")
        if not isinstance(answer, TokenIds):
            raise EngineFailed("the text process gave another answer than was asked for")
        return answer.token_ids

    async def compile(self, source: GrammarSource) -> str:
        """The grammar's text, which compiled within the limits. Raises InvalidRequest, and as `prepare`."""
        key = grammar_key(source)
        found = self._grammars.get(key)
        if found is None:
            answer = await self._ask(CheckGrammar(source), source.param)
            if not isinstance(answer, Grammar):
                raise EngineFailed("the text process gave another answer than was asked for")
            found = answer.text
            self._grammars.put(key, found)
        return found

    async def tokenize_chat(self, request: Request) -> tuple[int, ...]:
        """The ids that a chat request's prompt would have. Raises as `prepare`."""
        return (await self.prepare(request)).prompt_token_ids

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """The text of ids, control tokens spelled out, U+FFFD where bytes are no text. Raises InvalidRequest."""
        size = self.vocabulary.size
        for token in token_ids:
            if not 0 <= token < size:
                raise InvalidRequest(f"tokens: {token} is no token id of this model (0 to {size - 1})", param="tokens")
        return self.vocabulary.detokenize(token_ids).decode("utf-8", "replace")

    def _away(self) -> ServeError:
        if self._model_path is None:
            return ModelNotFound("no model runs here (engine.model is none), so there is no tokenizer", param="model")
        return EngineUnavailable("the text process is not running")

    def _read_template(self) -> str | None:
        path = self._settings.template
        if path is None:
            return None
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat.template: can't read {path}: {error}") from error

    async def _ask(self, order: Prepare | TokenizeText | CheckGrammar, param: str) -> Prompt | TokenIds | Grammar:
        if self._is_stopping or self._opened is None:
            raise self._away()
        try:
            body = msgspec.msgpack.encode(order)
        except UnicodeEncodeError:
            raise InvalidRequest(f"{param}: text holds half a surrogate pair", param=param) from None
        if len(self._waiting) >= MAX_WAITING or self._waiting_bytes + len(body) > MAX_WAITING_BYTES:
            raise ServerOverloaded(
                f"{len(self._waiting)} prompts with {self._waiting_bytes} bytes wait to be rendered, "
                f"limits {MAX_WAITING} and {MAX_WAITING_BYTES}",
                retry_after_s=1.0,
            )
        source = order.source if isinstance(order, CheckGrammar) else None
        job = _Job(body, asyncio.get_running_loop().create_future(), source)
        self._waiting.append(job)
        self._waiting_bytes += len(body)
        self._pump()
        return await job.answer

    def _pump(self) -> None:
        """Hand the next order over, if the child is free."""
        while self._is_open and self._current is None and self._waiting:
            job = self._waiting.popleft()
            self._waiting_bytes -= len(job.body)
            if job.answer.done():
                continue
            try:
                self._send(job)
            except ChildGone:
                # Its exit is on the way, and with it the next child.
                self._is_open = False
                self._waiting.appendleft(job)
                self._waiting_bytes += len(job.body)

    def _send(self, job: _Job) -> None:
        if self._child is None:
            raise ChildGone("there is no text process")
        self._child.send(job.body)
        self._current = job
        # The child limits itself in processor time; this is for one that gets none, or is stopped.
        wall_s = 20 * (self._settings.render_timeout_s + self._settings.tokenize_timeout_s)
        self._backstop = asyncio.get_running_loop().call_later(wall_s, self._overdue, job, wall_s)

    def _overdue(self, job: _Job, wall_s: float) -> None:
        if job is self._current and self._child is not None:
            if not job.answer.done():
                job.answer.set_exception(EngineTimeout(f"the text process did not answer within {wall_s:g} s"))
            self._child.kill()

    def _finish(self) -> _Job | None:
        job, self._current = self._current, None
        if self._backstop is not None:
            self._backstop.cancel()
            self._backstop = None
        return job

    async def _spawn(self) -> None:
        order: Order = Open(
            model_path=self._model_path or "",
            libllama=self._libllama,
            template=self._template,
            render_timeout_s=self._settings.render_timeout_s,
            tokenize_timeout_s=self._settings.tokenize_timeout_s,
            max_prompt_bytes=self._settings.max_prompt_bytes,
            wants_table=self._vocabulary is None,
            checkpoint=self._checkpoint,
        )
        self._child = Child(["-m", "hitsend.serve.text_worker"], on_message=self._on_message, on_exit=self._on_exit)
        try:
            await self._child.start()
            self._child.send(msgspec.msgpack.encode(order))
        except OSError as error:
            raise EngineUnavailable(f"the text process can't be started: {error}") from error
        except ChildGone:
            # It died at once: its exit is reported by callback.
            return
        asyncio.get_running_loop().call_later(START_TIMEOUT_S, self._not_open, self._child)

    def _not_open(self, child: Child) -> None:
        if child is self._child and not self._is_open:
            child.kill()

    def _on_message(self, body: bytes) -> None:
        answer = self._decoder.decode(body)
        if isinstance(answer, Opened) and self._facts is not None and self._facts.words != answer.facts.words:
            _log.error("the text process: %s", OTHER_FILE.format(self._model_path))
            if self._child is not None:
                self._child.kill()
        elif isinstance(answer, Opened):
            self._facts = answer.facts
            self._vocabulary = answer.vocabulary or self._vocabulary
            self._is_open, self._failures = True, 0
            if self._opened is not None and not self._opened.done():
                self._opened.set_result(None)
        elif isinstance(answer, NotOpened):
            if self._opened is not None and not self._opened.done():
                self._opened.set_exception(ConfigError(answer.message))
        else:
            job = self._finish()
            if job is not None and not job.answer.done():
                _settle(job, answer)
        self._pump()

    def _on_exit(self, end: ChildExit) -> None:
        was_open, self._is_open = self._is_open, False
        job = self._finish()
        if job is not None and not job.answer.done():
            job.answer.set_exception(end_reason(end, self._settings, job.grammar))
        if self._opened is not None and not self._opened.done():
            words = " ".join(end.lines[-3:])
            self._opened.set_exception(EngineUnavailable(f"the text process ended at start-up ({end.how}) {words}"))
        if not self._is_stopping and self._facts is not None:
            self._failures += 0 if was_open else 1
            self._restarting = asyncio.get_running_loop().create_task(self._restart(), name="text child restart")

    async def _restart(self) -> None:
        if self._failures:
            self._fail_all(EngineUnavailable("the text process can't be restarted", retry_after_s=_LONGEST_PAUSE_S))
            await asyncio.sleep(min(0.1 * 2**self._failures, _LONGEST_PAUSE_S))
        self.restarts += 1
        with contextlib.suppress(EngineUnavailable):
            await self._spawn()

    def _fail_all(self, error: ServeError) -> None:
        jobs = [*self._waiting, *([job] if (job := self._finish()) else [])]
        self._waiting.clear()
        self._waiting_bytes = 0
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(type(error)(error.message, retry_after_s=error.retry_after_s))


def _settle(job: _Job, answer: Prompt | TokenIds | Grammar | Refused) -> None:
    if isinstance(answer, Refused):
        job.answer.set_exception(from_code(answer.code, answer.message, param=answer.param))
    else:
        job.answer.set_result(answer)
