"""What the metrics are told: figures of a request that has ended, of a step, of the engine, of the limits.

Enters: nothing. Leaves: structs and protocols. Always true: no text of a request is in them, and what a client typed is
in none but `request_id`, which becomes no label. Next: `metrics.py`.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from hitsend.core.drafts import Drafted
from hitsend.serve.usage.elsewhere import Course, UpstreamCall


class RequestFigures(msgspec.Struct, frozen=True):
    """One ended request. Times in seconds, None where it never got so far.

    `model` is a served model's name, never the client's text. `cancelled_during` is the state it was in; `gaps_s` are
    the times between following tokens of one choice. `error_code` is a ServeError's. `has_row`: it has a ledger row.
    `outcome`: how it stands to the objectives (`usage/objectives.py`), None where it isn't judged. `refused_by` names
    the level and the limit that refused it. `segments_s`: where its time went, by `core.segments.SEGMENTS`. `calls` and
    `course`: what it did at upstreams and on a route.
    """

    model: str
    wall_s: float
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    finish_reasons: tuple[str, ...] = ()
    error_code: str | None = None
    cancelled_during: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    discarded_tokens: int = 0
    cost_microusd: int = 0
    has_row: bool = False
    request_id: str | None = None
    outcome: str | None = None
    refused_by: tuple[str, str] | None = None
    segments_s: tuple[float, ...] = ()
    calls: tuple[UpstreamCall, ...] = ()
    course: Course | None = None


class StepCounts(Protocol):
    """What `observe_step` reads: the fields of an engine's `StepFigures`."""

    @property
    def prefill_tokens(self) -> int: ...  # noqa: D102
    @property
    def decode_tokens(self) -> int: ...  # noqa: D102
    @property
    def output_tokens(self) -> int: ...  # noqa: D102
    @property
    def step_s(self) -> float: ...  # noqa: D102
    @property
    def decode_s(self) -> float: ...  # noqa: D102
    @property
    def sequences(self) -> int: ...  # noqa: D102
    @property
    def running(self) -> int: ...  # noqa: D102
    @property
    def waiting(self) -> int: ...  # noqa: D102
    @property
    def cells_used(self) -> int: ...  # noqa: D102
    @property
    def drafts(self) -> tuple[Drafted, ...]: ...  # noqa: D102


class EngineFigures(Protocol):
    """What `set_engine` reads: the fields of an engine's `EngineState`."""

    @property
    def is_ready(self) -> bool: ...  # noqa: D102  # the names are explained where EngineState is
    @property
    def restarts(self) -> int: ...  # noqa: D102
    @property
    def running(self) -> int: ...  # noqa: D102
    @property
    def waiting(self) -> int: ...  # noqa: D102
    @property
    def cells_total(self) -> int: ...  # noqa: D102
    @property
    def cells_used(self) -> int: ...  # noqa: D102
    @property
    def slots_total(self) -> int: ...  # noqa: D102
    @property
    def slots_used(self) -> int: ...  # noqa: D102
    @property
    def preemptions_total(self) -> int: ...  # noqa: D102
    @property
    def progress_age_s(self) -> float: ...  # noqa: D102
    @property
    def paused(self) -> int: ...  # noqa: D102
    @property
    def num_threads(self) -> int: ...  # noqa: D102


class BudgetFigures(Protocol):
    """What is read of a budget for everybody."""

    @property
    def window(self) -> str: ...  # noqa: D102
    @property
    def limit_microusd(self) -> int: ...  # noqa: D102
    @property
    def used_microusd(self) -> int: ...  # noqa: D102


class QuotaFigures(Protocol):
    """What is read of the limits' health."""

    @property
    def is_up(self) -> bool: ...  # noqa: D102
    @property
    def num_outages(self) -> int: ...  # noqa: D102
    @property
    def num_unchecked(self) -> int: ...  # noqa: D102
    @property
    def num_refused(self) -> int: ...  # noqa: D102
    @property
    def budgets(self) -> Sequence[BudgetFigures]: ...  # noqa: D102


class Observer(Protocol):
    """Who counts what requests did: `Metrics`, or the way to the process that has them."""

    def observe_request(self, figures: RequestFigures) -> None:
        """Count a request that has ended. Call once per request."""
        ...

    def observe_http(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        ...
