"""What happened to a request: the values stages return, which are also what the flight record shows.

Enters: facts found by one stage. Leaves: frozen, tagged structs (`type` in JSON is the class name in snake case).
Always true: no event holds prompt or output text unless its field says "captured", and those stay None while
`record.text` is false; instants are `Clock.now()` seconds and become milliseconds since arrival in the record.
Next: `record.py`.
"""

from typing import Any

import msgspec

from hitsend.core.drafts import Drafted
from hitsend.core.limits import LevelUse
from hitsend.core.request import SamplingParams


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


class Event(msgspec.Struct, frozen=True, tag=_snake, tag_field="type"):
    """Base of all events: only there so that every event is tagged the same way."""


class LimitCheck(msgspec.Struct, frozen=True):
    """One limit that was tested: `value` is what the request brought, in the limit's own unit."""

    name: str
    value: int
    limit: int


class TokenSpan(msgspec.Struct, frozen=True):
    """Where one message's content lies in the prompt: tokens [start, end) of message number `message`."""

    message: int
    role: str
    start: int
    end: int


class Received(Event, frozen=True):
    """The head of the request arrived. `client` is the peer's address."""

    method: str
    path: str
    client: str | None = None


class Authenticated(Event, frozen=True):
    """The caller is known."""

    name: str
    key_id: str | None
    user: str | None
    app: str | None
    org: str | None


class Parsed(Event, frozen=True):
    """The body became a `Request` and passed every limit that needs no tokens."""

    body_bytes: int
    num_messages: int
    stream: bool
    n: int
    limits: tuple[LimitCheck, ...]
    warnings: tuple[str, ...] = ()


class Rendered(Event, frozen=True):
    """The checkpoint's template turned messages into prompt text. `text` only when captured."""

    started_at: float
    ended_at: float
    template_sha256: str
    num_chars: int
    template_kwargs: dict[str, Any]
    text: str | None = None


class Tokenized(Event, frozen=True):
    """The prompt text became ids. `prompt_token_ids` only when captured."""

    started_at: float
    ended_at: float
    num_tokens: int
    num_control_tokens: int
    spans: tuple[TokenSpan, ...]
    prompt_token_ids: tuple[int, ...] | None = None


class Fitted(Event, frozen=True):
    """The second limit check, in tokens, and the sampling values that will be used (`sources`: field → where from).

    `warnings`: what the engine doesn't do of what was asked, where the settings have it left out.
    """

    max_tokens: int
    limits: tuple[LimitCheck, ...]
    sampling: SamplingParams
    sources: dict[str, str]
    warnings: tuple[str, ...] = ()


class LimitsChecked(Event, frozen=True):
    """All limits of all levels were tested in one step; one whose value is over its limit is why it was refused.

    The record shows them one by one, with `level`, `name`, `value` and `limit`.
    """

    limits: tuple[LevelUse, ...]


class Reserved(Event, frozen=True):
    """A hold was taken for input plus allowed output."""

    hold_id: str
    input_tokens: int
    output_tokens: int
    held_microusd: int
    price_id: str


class Routed(Event, frozen=True):
    """An engine was chosen. `layout`: how the weights of an embedded model are stored, as far as it is ours to know.

    Of a request to a route, `route` is its name, `candidates` what was known of each of its engines when the first one
    was chosen, `attempt` counts from 1; `facts` are what the rule knew of the request, with the first one.
    """

    engine: str
    model: str
    reason: str
    layout: str | None = None
    route: str | None = None
    attempt: int = 1
    candidates: tuple[dict[str, Any], ...] = ()
    facts: dict[str, Any] | None = None


class ModelLoaded(Event, frozen=True):
    """The model that the request waited for is in memory; the loading may have begun before the request came."""

    started_at: float
    ended_at: float
    num_bytes: int


class Queued(Event, frozen=True):
    """The engine took the request into its waiting queue."""

    at: float
    num_waiting: int
    num_running: int


class Admitted(Event, frozen=True):
    """One choice got its cells: `cells_free` before, `cells_reserved` for it."""

    at: float
    choice: int
    slot: int
    cells_free: int
    cells_reserved: int


class PrefixMatched(Event, frozen=True):
    """The prompt was looked up in the prefix cache, when the choice began.

    The first `matched_tokens` of it are known there, `cached_tokens` of them were used, always less than the whole
    prompt. `limited_by` says why not more: `checkpoint` (a model with recurrent layers kept no state behind the rest),
    `step` (what is left is shorter than `engine.prefix_cache_step`, or the last token), `place` (the rest is no longer
    there, or not yet, or there was no room to bring it).
    `source`: `live` (cells left by a request that ended), `saved` (host memory), `disk`, `sibling` (cells of one that
    runs), or null. `differs_at`: the first position at which prompt and cache part, with the token on either side; the
    texts only when captured.
    """

    at: float
    choice: int
    prompt_tokens: int
    matched_tokens: int
    cached_tokens: int
    source: str | None = None
    limited_by: str | None = None
    differs_at: int | None = None
    cached_token_id: int | None = None
    prompt_token_id: int | None = None
    cached_text: str | None = None
    prompt_text: str | None = None


class Preempted(Event, frozen=True):
    """One choice lost its cells and waits to be computed again."""

    at: float
    choice: int
    num_computed_tokens: int


class Paused(Event, frozen=True):
    """The client reads too slowly: the request keeps its cells and isn't scheduled."""

    at: float


class Resumed(Event, frozen=True):
    """The client caught up."""

    at: float


class Step(Event, frozen=True):
    """One pass of the loop in which this request took part: its own tokens and the whole batch beside them.

    `decode_tokens` counts what stayed; `drafts` are guesses that were checked in this pass, right or not.
    """

    step: int
    started_at: float
    ended_at: float
    prefill_tokens: int
    decode_tokens: int
    batch_prefill_tokens: int
    batch_decode_tokens: int
    batch_sequences: int
    drafts: tuple[Drafted, ...] = ()


class FirstToken(Event, frozen=True):
    """The first token of the request was sampled."""

    at: float
    choice: int


class Sent(Event, frozen=True):
    """The request went to an upstream; `attempt` counts from 1."""

    at: float
    attempt: int


class PromptCounted(Event, frozen=True):
    """The prompt's tokens, by the tokenizer of the model that gets it, told after the request was sent."""

    at: float
    prompt_tokens: int


class Answered(Event, frozen=True):
    """The upstream's status line is there. `will_retry`: nothing of an answer was, and it is asked once more."""

    at: float
    status: int | None
    reason: str
    will_retry: bool = False


class Streamed(Event, frozen=True):
    """The upstream's answer ended, or was left: all that came of it between these instants."""

    started_at: float
    ended_at: float
    num_bytes: int
    num_chunks: int
    is_whole: bool


class Held(Event, frozen=True):
    """Bytes kept back, and why (`partial_utf8` or `partial_stop`). Recorded when holding begins, per choice."""

    choice: int
    num_bytes: int
    reason: str


class StopMatched(Event, frozen=True):
    """A stop string completed; everything from its first byte on is withheld."""

    choice: int
    stop: str
    num_tokens: int


class ToolCallMalformed(Event, frozen=True):
    """A call that the model wrote didn't work out; what of it wasn't sent came back as text. One event per fault."""

    choice: int
    detail: str


class ChoiceFinished(Event, frozen=True):
    """One choice ended. `num_discarded_tokens` were computed after its end was known and are billed to nobody."""

    choice: int
    finish_reason: str
    num_tokens: int
    num_discarded_tokens: int = 0


class Released(Event, frozen=True):
    """Slots and cells went back; `cells_used` is the whole engine's figure afterwards."""

    at: float
    cells_used: int


class Settled(Event, frozen=True):
    """The hold was settled with real counts: exactly once."""

    started_at: float
    ended_at: float
    hold_id: str
    prompt_tokens: int
    completion_tokens: int
    cost_microusd: int
    reason: str


class Failed(Event, frozen=True):
    """The request ended in an error."""

    code: str
    message: str
    param: str | None = None


class Cancelled(Event, frozen=True):
    """The client went away (or was cut off); `during` is the state in which it happened."""

    reason: str
    during: str


class Delivered(Event, frozen=True):
    """The last byte was handed to the socket."""

    at: float
    num_bytes: int
    num_chunks: int


AnyEvent = (
    Received
    | Authenticated
    | Parsed
    | Rendered
    | Tokenized
    | Fitted
    | LimitsChecked
    | Reserved
    | Routed
    | ModelLoaded
    | Queued
    | Admitted
    | PrefixMatched
    | Preempted
    | Paused
    | Resumed
    | Step
    | FirstToken
    | Sent
    | Answered
    | Streamed
    | Held
    | StopMatched
    | ToolCallMalformed
    | ChoiceFinished
    | Released
    | Settled
    | Failed
    | Cancelled
    | Delivered
)
