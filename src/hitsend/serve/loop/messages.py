"""What goes into the loop and what comes out: the words spoken between the edge and the engine's child process.

Enters: commands from the edge. Leaves: reports. Always true: every struct is tagged, typed and bounded by its decoder
(msgspec rejects anything else), no pickle anywhere; instants are `Clock.now()` seconds, comparable across processes;
each submitted choice ends with exactly one `Done`. Next: `sequence.py`.
"""

from typing import Any

import msgspec

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.drafts import Drafted
from hitsend.core.errors import ServeError
from hitsend.core.lifecycle import FinishReason
from hitsend.core.request import SampledToken, SamplingParams, ScoredToken


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run `len(seeds)` choices of one prompt. `max_tokens` bounds each; `deadline_s` bounds the time spent waiting.

    `tier` 0 is served first; `tenant` is whom it is for, from the outermost level to the innermost, "" where unknown:
    those of one tier share the engine fairly at each level.
    `adapter`: the one that its cache and its tokens are computed with; no cache may go to another one's sequences.
    The prompt is computed once for all choices that find a place by then; `prefill_tokens` and
    `num_prompt_tokens_computed` are those of the choice that computed it.
    `cache_salt`: whose prefix cache this may use and add to; None: nobody's. `boundaries`: positions in the prompt
    where messages end.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    max_tokens: int
    deadline_s: float
    tier: int = 1
    tenant: tuple[str, ...] = ()
    constraint: ConstraintSpec | None = None
    adapter: str | None = None
    cache_salt: str | None = None
    boundaries: tuple[int, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End one choice, or (choice None) all choices of a request. Unknown ids are ignored: they have just ended."""

    request_id: str
    choice: int | None = None


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Keep the request's cells but don't schedule it."""

    request_id: str


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Schedule it again."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End everything and exit."""


Command = Submit | Abort | Pause | Resume | Shutdown


class EngineFacts(msgspec.Struct, frozen=True):
    """What the child found when it loaded the model. Sizes in tokens, cells (one token's attention KV) or bytes.

    `cells_per_slot` is the most one sequence can hold. `state_bytes_per_slot` is the fixed recurrent state of hybrid
    models (0 for pure attention). `cache_secret` is drawn by each child: salts of its prefix cache are made with it.
    `library` names the libllama build. `layout` is that of the weights that were loaded. `speculation` is where guesses
    come from (`off`: there are none; `speculation_reason` says why not, where that wasn't asked for).
    `unmet`: settings that have no effect, or another than they say. `words`: see `LoadedModel.words_id`.
    """

    model: str
    architecture: str
    library: str
    vocab_size: int
    context_train: int
    num_slots: int
    num_cells: int
    cells_per_slot: int
    kv_mode: str
    kv_bytes_per_cell: int
    state_bytes_per_slot: int
    weights_bytes: int
    num_threads: int
    is_hybrid: bool
    adapters: tuple[str, ...] = ()
    cache_secret: str = ""
    metadata: dict[str, Any] = {}
    layout: str = "as-shipped"
    kv_type: str = "f16"
    speculation: str = "off"
    speculation_reason: str = ""
    unmet: tuple[str, ...] = ()
    words: str = ""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child's first message."""

    pid: int
    facts: EngineFacts


class WasQueued(msgspec.Struct, frozen=True, tag="queued"):
    """A submitted request waits."""

    request_id: str
    at: float
    num_waiting: int
    num_running: int


class WasAdmitted(msgspec.Struct, frozen=True, tag="admitted"):
    """One choice got a slot and cells."""

    request_id: str
    choice: int
    at: float
    slot: int
    cells_free: int
    cells_reserved: int


class WasMatched(msgspec.Struct, frozen=True, tag="matched"):
    """One choice's prompt was looked up in the prefix cache: `num_matched` tokens are known there, `num_usable` are
    used.

    `source`: live (cells that somebody left), saved (host memory), disk, sibling (cells of somebody who runs), or ""
    for none. `limit`: why not more (`PrefixMatched.limited_by`). Where known and own tokens part: `position`, and the
    token on either side.
    """

    request_id: str
    choice: int
    at: float
    num_matched: int
    num_usable: int
    source: str = ""
    limit: str = ""
    position: int | None = None
    known_token_id: int | None = None
    token_id: int | None = None


class WasPreempted(msgspec.Struct, frozen=True, tag="preempted"):
    """One choice gave its cells back and waits at the head of the queue."""

    request_id: str
    choice: int
    at: float
    num_computed_tokens: int


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One choice's part in a step; `sampled` is empty while its prompt isn't finished.

    `decode_tokens` counts what stays in its cache: its pending token and what was right of `drafted`.

    `scored`: the next tokens of the prompt, where the request wants their log-probabilities.
    Without any tokens of its own, but with a sampled one: it got a copy of the prompt that a sibling computed."""

    request_id: str
    choice: int
    prefill_tokens: int
    decode_tokens: int
    sampled: tuple[SampledToken, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    drafted: Drafted | None = None


class Done(msgspec.Struct, frozen=True, tag="done"):
    """One choice ended and its cells are free.

    `reason` is a `FinishReason` value: stop (the model's own end token or one of `stop_token_ids`, which is not in the
    output and not counted in `num_output_tokens`), length, cancelled or error; with error, `code` and `message` are a
    ServeError's.
    `num_prompt_tokens_computed` counts prompt tokens that really went through the model (again after a preemption
    does not count twice), `num_cached_tokens` those that came from the prefix cache instead; `num_output_tokens` counts
    sampled tokens that were reported in rows.
    """

    request_id: str
    choice: int
    at: float
    reason: str
    num_prompt_tokens_computed: int
    num_output_tokens: int
    code: str | None = None
    message: str | None = None
    retry_after_s: float | None = None
    num_cached_tokens: int = 0


class StepReport(msgspec.Struct, frozen=True, tag="step"):
    """One pass through the model, and the pool's figures after it. `decode_s` is the part spent inside the decoder."""

    step: int
    started_at: float
    ended_at: float
    decode_s: float
    rows: tuple[Row, ...]
    done: tuple[Done, ...]
    num_waiting: int
    num_running: int
    cells_used: int


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """Sent at least once a second and after each change at rest: proof of progress. `check`: what kv.check() found.

    `cells_cached` hold prefixes for nobody and count as free; `cache_bytes` of host memory hold saved ones, and
    `cache_disk_bytes` of disk, to which nothing is written any more where there is a `cache_disk_problem`.
    """

    at: float
    step: int
    num_waiting: int
    num_running: int
    cells_used: int
    slots_used: int
    prefill_tokens_total: int
    decode_tokens_total: int
    preemptions_total: int
    check: str | None = None
    num_paused: int = 0
    cells_cached: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0
    cache_disk_problem: str | None = None


Report = Ready | WasQueued | WasAdmitted | WasMatched | WasPreempted | StepReport | Done | Pulse


def what_is_wrong(submit: Submit, vocab_size: int, adapters: frozenset[str] = frozenset()) -> str | None:
    """What the edge should never have let through; here it would stop the process or everybody's batch."""
    if submit.adapter is not None and submit.adapter not in adapters:
        return f"There is no adapter {submit.adapter!r} here."
    prompt = submit.prompt_token_ids
    if not prompt:
        return "The prompt has no tokens."
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"The prompt has tokens from {min(prompt)} to {max(prompt)}; the vocabulary ends at {vocab_size - 1}."
    if submit.max_tokens < 1:
        return f"max_tokens is {submit.max_tokens}; it has to be at least 1."
    sampling, spec = submit.sampling, submit.constraint or ConstraintSpec()
    for field, ids in (
        ("logit_bias", [i for i, _ in sampling.logit_bias]),
        ("stop_token_ids", sampling.stop_token_ids),
        ("constraint", (*spec.opens_with, *(spec.starts_after or ()))),
    ):
        outside = [token for token in ids if not 0 <= token < vocab_size]
        if outside:
            return f"{field} names token {outside[0]}; the vocabulary ends at {vocab_size - 1}."
    return None


def refused(request_id: str, choice: int, at: float, error: ServeError) -> Done:
    """The end of a choice that never began."""
    return Done(
        request_id=request_id,
        choice=choice,
        at=at,
        reason=FinishReason.ERROR.value,
        num_prompt_tokens_computed=0,
        num_output_tokens=0,
        code=error.code,
        message=error.message,
        retry_after_s=error.retry_after_s,
    )
