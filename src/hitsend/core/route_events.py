"""What happened to a request because its model's name is a route's.

Enters: facts found by `serve/routed.py` and its neighbours. Leaves: events like those of `events.py`. Always true: as
there. Next: `record.py`.
"""

from hitsend.core.events import Event


class Abandoned(Event, frozen=True):
    """An engine of a route was given up before the client had got anything of its answer; the next one is asked.

    `code`: the error's, or `rejected` for a cascade's draft. What it cost the operator is `cost_microusd`, an estimate
    where the engine gave no usage; `billed_microusd` of it is the caller's.
    """

    at: float
    engine: str
    model: str
    code: str
    message: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_microusd: int = 0
    billed_microusd: int = 0


class Judged(Event, frozen=True):
    """A cascade's draft was judged before it was sent. `verdicts`: scorer to what it found; all must accept."""

    started_at: float
    at: float
    engine: str
    model: str
    accepted: bool
    verdicts: dict[str, str]
    mean_logprob: float | None = None
    judge_microusd: int = 0


class Shadowed(Event, frozen=True):
    """A copy of the request was sent to another engine. `request_id` has a record of its own; None: too many ran."""

    model: str
    request_id: str | None


class Hedged(Event, frozen=True):
    """Two servers of one engine were asked, and this run was left for the other, which spoke first, or ended with it.

    `request_id` has a record and a row of its own: an estimate of what it cost. `was_first`: it was asked first.
    """

    started_at: float
    at: float
    request_id: str
    was_first: bool
