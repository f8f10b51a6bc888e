"""What the pipeline asks of any engine.

Enters: a `Job`. Leaves: a `Generation`. Two facts say how an engine is spoken to: it `takes` tokens or messages, and it
`gives` tokens or text (deltas that clients may see as they are). Always true: events come in the order in which they
happened; each choice ends exactly once; failures are raised as ServeErrors; after `aclose()` the engine holds nothing
for the job and `produced` is final. Next: `embedded.py`.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, Protocol

import msgspec

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.drafts import Drafted
from hitsend.core.events import (
    Admitted,
    Answered,
    FirstToken,
    ModelLoaded,
    Paused,
    Preempted,
    PrefixMatched,
    PromptCounted,
    Queued,
    Released,
    Resumed,
    Sent,
    Step,
    Streamed,
)
from hitsend.core.request import Delta, Request, SampledToken, SamplingParams, ScoredToken, Usage
from hitsend.core.route_events import Hedged
from hitsend.serve.engine.embedding_messages import EmbedderFacts, Vectors
from hitsend.serve.loop.messages import EngineFacts

Counting = Callable[[], Awaitable[int | None]]
"""Tells a prompt's tokens; None where they can't be told."""


class Job(msgspec.Struct, frozen=True):
    """One request as an engine sees it. Choice i samples with `sampling.seed + i`; `deadline_s` bounds waiting.

    An engine that takes messages reads `chat`, and has no ids: `num_prompt_reserved` is the most that they can be,
    `num_prompt_estimated` what is billed where the engine doesn't say, unless `counting` does, which is for the time
    in which the engine works.
    `tier`, `tenant`, `adapter`, `boundaries`: see `Submit`. `cache_salt` is the client's, and parts its prefix cache
    further. `traceparent`: W3C's header for whoever is asked over HTTP. With `more_prompts` it is split before it
    reaches an engine (see `several.py`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int
    max_tokens: int
    deadline_s: float
    constraint: ConstraintSpec | None = None
    more_prompts: tuple[tuple[int, ...], ...] = ()
    tier: int = 1
    tenant: tuple[str, ...] = ()
    adapter: str | None = None
    cache_salt: str | None = None
    boundaries: tuple[int, ...] = ()
    chat: Request | None = None
    num_prompt_reserved: int = 0
    num_prompt_estimated: int = 0
    counting: Counting | None = None
    traceparent: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together."""
        if self.chat is not None:
            return self.num_prompt_reserved
        return len(self.prompt_token_ids) + sum(map(len, self.more_prompts))

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return self.n * (1 + len(self.more_prompts))


class Tokens(msgspec.Struct, frozen=True):
    """Sampled tokens of one choice, in order."""

    choice: int
    sampled: tuple[SampledToken, ...]


class PromptScored(msgspec.Struct, frozen=True):
    """The next tokens of the prompt, from its second one on, computed by this choice for all of its request."""

    choice: int
    scored: tuple[ScoredToken, ...]


class ChoiceDone(msgspec.Struct, frozen=True):
    """One choice ended by itself: reason is `stop` (the model's end token) or `length`."""

    choice: int
    reason: Literal["stop", "length"]


class Produced(msgspec.Struct, frozen=True):
    """What was really computed: prompt tokens that went through the model (of the choice that got furthest), and output
    tokens per choice; `cached_tokens` of the prompt came from the prefix cache instead. Where the engine counts for us,
    `usage` is its bill for all of it; `is_estimate`: it gave none, or was left before it could.
    """

    prompt_tokens: int
    output_tokens: tuple[int, ...]
    usage: Usage | None = None
    is_estimate: bool = False
    cached_tokens: int = 0


EngineEvent = (
    Queued
    | ModelLoaded
    | Admitted
    | PrefixMatched
    | Preempted
    | Paused
    | Resumed
    | Step
    | FirstToken
    | Released
    | Sent
    | Answered
    | Streamed
    | Hedged
    | PromptCounted
    | Tokens
    | PromptScored
    | Delta
    | ChoiceDone
)
"""An engine that gives tokens ends a choice by `ChoiceDone`, one that gives text by a `Delta` with a finish reason."""


class Generation(Protocol):
    """A running job. Iterate it; close it when done or to cancel."""

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        """The events, ending after the last choice's `ChoiceDone`. Raises ServeError where the engine failed."""
        ...

    async def end_choice(self, choice: int) -> None:
        """Stop one choice whose end was found in the text (a stop string); the others go on. Does not wait."""
        ...

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the engine has released it, or is gone. Safe to call twice.

        Afterwards iterating gives what was left unread, without waiting and without raising.
        """
        ...

    @property
    def produced(self) -> Produced:
        """Counts so far; final after `aclose()`."""
        ...


class StepFigures(msgspec.Struct, frozen=True):
    """One step, for the metrics. `step_s` reaches from the end of the step before; `decode_s` is inside the model.

    `sequences` took part in it; after it so many were `running` and `waiting`, with so many cells held.
    `decode_tokens` counts what stayed of what was computed; `drafts` tells what was guessed.
    """

    prefill_tokens: int
    decode_tokens: int
    output_tokens: int
    step_s: float
    decode_s: float
    drafts: tuple[Drafted, ...] = ()
    sequences: int = 0
    running: int = 0
    waiting: int = 0
    cells_used: int = 0


class EngineState(msgspec.Struct, frozen=True):
    """For `/inspect/state`, `/metrics`, `/healthz`. `progress_age_s`: since the engine last proved that it lives.

    `paused` of those that run have a client that doesn't read; `num_threads` compute (0: not here).
    """

    is_ready: bool
    pid: int | None
    restarts: int
    running: int
    waiting: int
    cells_total: int
    cells_used: int
    slots_total: int
    slots_used: int
    preemptions_total: int
    progress_age_s: float
    check: str | None = None
    paused: int = 0
    num_threads: int = 0
    cells_cached: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0


class Engine(Protocol):
    """Something that answers jobs."""

    @property
    def takes(self) -> Literal["tokens", "messages"]:
        """What it reads of a job: the prompt's ids, or the chat as the client sent it."""
        ...

    @property
    def gives(self) -> Literal["tokens", "text"]:
        """Whether its output still has to become text."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, where a model without a price is free."""
        ...

    @property
    def name(self) -> str:
        """Its name in settings, records and rows."""
        ...

    @property
    def facts(self) -> EngineFacts:
        """What is loaded. Raises EngineUnavailable before the first start-up finished."""
        ...

    async def start(self) -> None:
        """Load the model; returns when it can serve. Raises ConfigError or EngineUnavailable."""
        ...

    async def stop(self) -> None:
        """End everything, wait for the child, return. Safe to call twice."""
        ...

    def shed(self, tenant: tuple[str, ...], choices: int) -> None:
        """Before anything is prepared: refuse what `admit` would refuse whatever was asked (ServerOverloaded,
        EngineUnavailable, ShuttingDown)."""
        ...

    def admit(self, job: Job) -> None:
        """Refuse at once what can never fit (ContextLengthExceeded) or a full queue (ServerOverloaded)."""
        ...

    def generate(self, job: Job) -> Generation:
        """Submit the job. Raises what `admit` raises, and EngineUnavailable while the child is down."""
        ...

    def state(self) -> EngineState:
        """Figures of this moment; never blocks."""
        ...


class EmbeddingBatch(Protocol):
    """One batch that was handed in. Whoever stops waiting for it withdraws it, or else it is computed all the same."""

    async def vectors(self) -> Vectors:
        """The vectors. May be cancelled and asked again. Raises EngineError."""
        ...

    def withdraw(self) -> bool:
        """Take it back. False: it may be too late, `vectors` tells by an answer or an error."""
        ...


class EmbeddingModel(Protocol):
    """A model that takes texts and gives vectors."""

    @property
    def model(self) -> str:
        """Its served name."""
        ...

    @property
    def name(self) -> str:
        """Its engine's name in settings, records and rows."""
        ...

    @property
    def facts(self) -> EmbedderFacts:
        """What is loaded. Raises EngineUnavailable before the first start."""
        ...

    def state(self) -> dict[str, Any]:
        """For `/inspect/state`."""
        ...

    async def start(self) -> None:
        """Load the model. Raises ConfigError or EngineUnavailable."""
        ...

    async def stop(self) -> None:
        """Whoever waits gets an error. Safe to call twice."""
        ...

    async def tokenize(self, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Ids of each text, special tokens included. Raises EngineError, ServerOverloaded."""
        ...

    def submit(self, inputs: tuple[tuple[int, ...], ...], dimensions: int) -> EmbeddingBatch:
        """Hand in one batch, which must keep to the limits in `facts`. Raises EngineUnavailable, ServerOverloaded."""
        ...
