"""A model that always says the same, in this process: text and engine of a server whose crashes are the subject."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

from hitsend.core import events as ev
from hitsend.core.clock import Clock
from hitsend.core.request import Request, SampledToken
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.prompt import Prompt, TextFacts
from hitsend.serve.children import Children
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.protocol import ChoiceDone, EngineState, Job, Produced, Tokens
from hitsend.serve.loop.messages import EngineFacts

STOP = "STOP"
ANSWER = b"one two three four five STOP and more that nobody gets"
PROMPT_TOKENS = 12
COMPLETION_TOKENS = ANSWER.index(b"STOP") + 4

Told = Callable[[str], None]
"""Hears the names of points as they are passed."""

FACTS = EngineFacts(
    model="scripted",
    architecture="none",
    library="none",
    vocab_size=256,
    context_train=4096,
    num_slots=64,
    num_cells=64 * 4096,
    cells_per_slot=4096,
    kv_mode="per_stream",
    kv_bytes_per_cell=1,
    state_bytes_per_slot=0,
    weights_bytes=1,
    num_threads=1,
    is_hybrid=False,
)


class ScriptedText:
    """Every prompt has the same length."""

    facts = TextFacts({}, "", (), None)
    metadata: dict[str, str] = {}  # noqa: RUF012  # nobody writes to it
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    pid = 1

    async def prepare(self, request: Request, **_: Any) -> Prompt:
        return Prompt((65,) * PROMPT_TOKENS, PROMPT_TOKENS, 0, (), PROMPT_TOKENS, "", 0.0, 0.0, 0.0, 0.0)


class ScriptedGeneration:
    """The answer, a letter at a time."""

    def __init__(self, clock: Clock, tell: Told) -> None:
        self._tell = tell
        self._num = 0
        self._is_over = False
        now = clock.now()
        first = (ev.Queued(now, 0, 0), ev.Admitted(now, 0, 0, 4096, 64), ev.FirstToken(now, 0))
        letters = (Tokens(0, (SampledToken(byte),)) for byte in ANSWER)
        self._events: deque[Any] = deque((*first, *letters, ChoiceDone(0, "length")))
        self._clock = clock

    async def __aiter__(self) -> AsyncIterator[Any]:
        while self._events:
            event = self._events.popleft()
            self._num += isinstance(event, Tokens)
            yield event
            await asyncio.sleep(0)

    async def end_choice(self, choice: int) -> None:
        self._tell("stop found")
        self._end()

    async def aclose(self) -> None:
        self._end()
        self._tell("engine released")

    @property
    def produced(self) -> Produced:
        return Produced(PROMPT_TOKENS, (self._num,))

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._events = deque((ev.Released(self._clock.now(), 0),))


class ScriptedEngine:
    """Takes everything."""

    name, facts = "embedded", FACTS
    takes = gives = "tokens"
    is_local = True

    def __init__(self, clock: Clock, tell: Told) -> None:
        self._clock = clock
        self._tell = tell

    def shed(self, tenant: tuple[str, ...], choices: int) -> None:
        """There is always room."""

    def admit(self, job: Job) -> None:
        """Everything fits."""

    def generate(self, job: Job) -> ScriptedGeneration:
        generation = ScriptedGeneration(self._clock, self._tell)
        self._tell("submitted to the engine")
        return generation

    def state(self) -> EngineState:
        return EngineState(True, 1, 0, 0, 0, FACTS.num_cells, 0, FACTS.num_slots, 0, 0, 0.0)


def scripted(tell: Told) -> Callable[..., Any]:
    """In the place of `start_children`."""

    async def start(settings: Any, clock: Clock, metrics: Any, stack: AsyncExitStack) -> Children:
        return Children(
            ModelFile("scripted.gguf", "scripted", "test"), ScriptedText(), ScriptedEngine(clock, tell), None
        )

    return start
