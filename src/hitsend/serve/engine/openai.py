"""Servers that speak OpenAI's chat API, or nearly, as an engine: takes messages, gives text.

Enters: jobs with a chat. Leaves: generations whose `Delta`s are the upstream's own words. Always true: no task per
request, but for a hedge and a count beside its work; a request is repeated at most once, only while nothing of an
answer had come, and within the retry budget; a stream that ends before every choice did is an error, never a stop; what
is billed is the upstream's usage, else our count, flagged; what the kinds of upstreams differ in is data
(`profiles.py`). Next: `upstream_generation.py`.

    what happened upstream                      what the caller gets                  breaker   tried again
    can't be reached, closed unanswered         502 engine_unavailable                failed    yes
    500, 502, 503, 504 …                        502 engine_unavailable (Retry-After)  failed    yes
    silent for stall_timeout_s                  504 engine_timeout                    failed    no: it may be working
    the same behind the end of every choice     the answer                            ok        -
    an error code that its profile knows        what the profile says                 …         …
    429                                         429 rate_limit_exceeded, Retry-After  -         no
    400, 404, 422                               400 with the upstream's code          ok        no
    413                                         413 request_too_large                 ok        no
    words of a prompt that is too long          400 context_length_exceeded           ok        no
    401, 403, 3xx, another 2xx than 200         502 engine_unavailable                failed    no
    402, a 429 that says there is no credit     502 engine_unavailable                failed    no
    no stream and no answer, a packed one       500 engine_failed                     failed    no
    an error in place of its first word         as the status that its code stands for
    cut or unreadable before its first word     500 engine_failed                     failed    if nothing had come
    the same after its first word               an error event                        failed    no
    too many at once, its queue or KV full      503 server_overloaded: at once, Retry-After
    breaker open, or the day's neurons gone     502 engine_unavailable, 429 insufficient_quota: at once, Retry-After
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import InsufficientQuota, InvalidRequest, ServeError, ServerOverloaded, ShuttingDown
from hitsend.core.request import Request
from hitsend.serve.engine.breaker import RetryBudget
from hitsend.serve.engine.hedge import Lost
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.openai_body import affinity, count_body
from hitsend.serve.engine.opening import MAX_WHOLE_BYTES
from hitsend.serve.engine.protocol import EngineState, Job
from hitsend.serve.engine.replicas import Replica, Replicas
from hitsend.serve.engine.terms import addresses, kind_of, terms_of
from hitsend.serve.engine.upstream_embeddings import UpstreamEmbedding, embeddings_body
from hitsend.serve.engine.upstream_generation import OpenAIGeneration
from hitsend.serve.engine.upstream_usage import MOST_TOKENS
from hitsend.serve.engine.vllm_process import VllmProcess
from hitsend.serve.loop.messages import EngineFacts
from hitsend.settings_upstreams import UpstreamBase, VllmSettings, WorkersAISettings

COUNT_PAUSE_S = 30.0
"""For which nobody is asked to count prompts who didn't answer that in time."""
FREE_NEURONS = 10_000
"""Of Workers AI, per UTC day and account; `usage/allowance.py` has the same in its own unit."""


class OpenAIEngine:
    """See `protocol.Engine`. `key` is the upstream's credential; `on_tokens` is told what each request brought.

    `salt` is this house's secret for what is derived from tenants; `command` starts its server here, if it is ours.
    """

    takes: Literal["messages"] = "messages"
    gives: Literal["text"] = "text"
    is_local = False

    def __init__(
        self,
        settings: UpstreamBase,
        clock: Clock,
        *,
        key: str | None,
        salt: bytes = b"",
        command: Sequence[str] = (),
        on_tokens: Callable[[str, int], None] = lambda _name, _tokens: None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.terms = terms_of(settings, salt)
        self.retries = RetryBudget(settings.retry_share)
        self.replicas = Replicas(settings, addresses(settings), self.terms.profile, clock, key=key)
        self._process = self._process_of(command) if command else None
        self.on_lost: Callable[[Lost], None] = lambda _: None
        """Told of each run that was left for a faster one."""
        self._on_tokens = on_tokens
        self._running: set[OpenAIGeneration] = set()
        self._is_stopping = False
        self._can_count = self.terms.profile.count_path is not None
        self._closed_until: float | None = None
        self._counts_again_at = 0.0
        self._facts = _facts_of(settings)

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        return self.settings.name

    @property
    def facts(self) -> EngineFacts:
        """What the settings say; it has no cells."""
        return self._facts

    async def start(self) -> None:
        """Get ready. Waits for no connection: an upstream that is away now may be back when it is asked.

        One that is started here is waited for. Raises ConfigError, EngineUnavailable.
        """
        self.replicas.start()
        if self._process is not None:
            await self._process.start()

    async def stop(self) -> None:
        """End everything. Safe to call twice."""
        self._is_stopping = True
        for generation in tuple(self._running):
            generation.fail(ShuttingDown("The server is shutting down."))
        await self.replicas.stop()
        if self._process is not None:
            await self._process.stop()

    def _process_of(self, command: Sequence[str]) -> VllmProcess:
        assert isinstance(self.settings, VllmSettings)
        timeout_s = self.settings.serve_start_timeout_s
        return VllmProcess(command, self.replicas.all[0].line, start_timeout_s=timeout_s)

    def shed(self, _tenant: tuple[str, ...], _choices: int) -> None:
        """Refuse at once what can't be taken now: breaker open, full there or here, the day's allowance gone."""
        if self._is_stopping:
            raise ShuttingDown("The server is shutting down.")
        closed_s = self._closed_s()
        if closed_s is not None:
            text = f"The upstream {self.name} has no neurons left today; it is asked again after 00:00 UTC."
            raise InsufficientQuota(text, retry_after_s=closed_s)
        self.replicas.choose()
        most = self.settings.max_concurrent
        if len(self._running) >= most:
            text = f"{len(self._running)} requests run at the upstream {self.name}, limit {most} (max_concurrent)."
            raise ServerOverloaded(text, retry_after_s=1.0)

    def admit(self, job: Job) -> None:
        """`shed`, and what no upstream takes."""
        self.shed(job.tenant, job.n)
        if job.chat is None:
            raise InvalidRequest("prompts that were tokenised here can't be served by an upstream", param="prompt")

    def generate(self, job: Job) -> OpenAIGeneration:
        """Take the job. Nothing is sent before the generation is iterated. Raises what `admit` raises."""
        self.admit(job)
        self.retries.pay_in()
        kin = affinity(job.chat, self.terms) if job.chat is not None and len(self.replicas.all) > 1 else None
        generation = OpenAIGeneration(job, self, self.replicas.choose(kin))
        self._running.add(generation)
        return generation

    def embed(
        self, model: str, inputs: tuple[str | tuple[int, ...], ...], dimensions: int | None, *, estimated: int
    ) -> UpstreamEmbedding:
        """Take an embedding request, by its model's name here. Raises what `shed` raises."""
        self.shed((), 1)
        self.retries.pay_in()
        told = dimensions if self.terms.profile.cuts_vectors else None
        body = embeddings_body(self.settings.embedding_models[model], inputs, told)
        return UpstreamEmbedding(self, body, len(inputs), dimensions, estimated=estimated)

    @property
    def neurons_limit_micro(self) -> int | None:
        """What its account may use on one UTC day; None: it isn't limited."""
        is_free = isinstance(self.settings, WorkersAISettings) and self.settings.plan == "free"
        return FREE_NEURONS * 1_000_000 if is_free else None

    async def count_prompt(self, request: Request) -> int | None:
        """The prompt's tokens by the upstream's own tokenizer and template; None where it doesn't tell."""
        path = self.terms.profile.count_path
        if path is None or not self._can_count or request.prompts or self.clock.now() < self._counts_again_at:
            return None
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                answer = await self.replicas.choose().line.post(path, count_body(request, self.terms))
                if answer.status in (404, 405, 501):
                    self._can_count = False  # it won't learn to
                body = await answer.read_whole(MAX_WHOLE_BYTES)
            if answer.status != 200 or body is None:
                return None
            found = msgspec.json.decode(body, type=dict[str, Any]).get(self.terms.profile.count_key)
        except TimeoutError:  # one that hangs would hold up every request
            self._counts_again_at = self.clock.now() + COUNT_PAUSE_S
            return None
        except (LineFailed, ServeError, msgspec.DecodeError, RecursionError):
            return None
        return found if isinstance(found, int) and 0 <= found <= MOST_TOKENS else None

    def left(self, generation: OpenAIGeneration) -> None:
        """A generation has ended: called by it, once."""
        self._running.discard(generation)
        usage = generation.produced.usage
        self._on_tokens(self.name, usage.completion_tokens if usage is not None else 0)

    def another(self, failed: Replica) -> Replica:
        """Who is asked next. The same one where nobody else can be."""
        try:
            return failed if len(self.replicas.all) == 1 else self.replicas.choose(but=failed)
        except ServeError:
            return failed

    def close_for(self, seconds: float) -> None:
        """Ask nothing more for so long."""
        self._closed_until = self.clock.wall() + seconds

    def _closed_s(self) -> float | None:
        if self._closed_until is None:
            return None
        left = self._closed_until - self.clock.wall()
        return left if left > 0 else None

    def state(self) -> EngineState:
        """Figures of this moment. What others have waiting at the upstream is in `shown`."""
        return EngineState(
            is_ready=self.replicas.is_ready and self._closed_s() is None and not self._is_stopping,
            pid=self._process.pid if self._process is not None else None,
            restarts=self._process.restarts if self._process is not None else 0,
            running=len(self._running),
            waiting=0,
            cells_total=0,
            cells_used=0,
            slots_total=self.settings.max_concurrent,
            slots_used=len(self._running),
            preemptions_total=0,
            progress_age_s=0.0,
        )

    def shown(self) -> dict[str, Any]:
        """For `/inspect/state`: its servers, and what they say of themselves."""
        servers = [
            {
                "base_url": one.url,
                "breaker": one.breaker.state,
                "is_draining": one.is_draining,
                "running": one.running,
                "load": msgspec.to_builtins(self.replicas.load(one)),
            }
            for one in self.replicas.all
        ]
        return {"kind": kind_of(self.settings), "servers": servers}


def _facts_of(settings: UpstreamBase) -> EngineFacts:
    return EngineFacts(
        model=settings.name,
        architecture="upstream",
        library=kind_of(settings),
        vocab_size=0,
        context_train=settings.context,
        num_slots=settings.max_concurrent,
        num_cells=0,
        cells_per_slot=settings.context,
        kv_mode="none",
        kv_bytes_per_cell=0,
        state_bytes_per_slot=0,
        weights_bytes=0,
        num_threads=0,
        is_hybrid=False,
    )
