"""The settings of routes: names that stand for several engines, and the rules by which one of them is chosen.

Enters: nothing. Leaves: section types. Always true: as in `settings.py`, which puts them into the tree. Next:
`settings.py`; `serve/engine/router.py` has the rules.
"""

from typing import Annotated, Literal

from msgspec import Meta

from hitsend.settings_engines import Positive, Seconds, Section, Share

Strategy = Literal[
    "fallback",
    "weighted",
    "cheapest",
    "fastest",
    "prompt_length",
    "thinking",
    "budget",
    "time_of_day",
    "canary",
    "cascade",
]


class CanarySettings(Section, frozen=True):
    """`strategy = "canary"`: the first engine is the stable one, the second gets `share` until it does worse."""

    share: Share = 0.1
    least: Positive = 20
    """Answers of each that there must be before it is judged."""
    more_errors: Share = 0.05
    """Rolled back when its share of errors is above the stable one's by more than this …"""
    slower: Annotated[float, Meta(ge=1)] = 1.5
    """… or its median time to the first token is more than so many times the stable one's."""


class CascadeSettings(Section, frozen=True):
    """`strategy = "cascade"`: an answer of every engine but the last is judged before it is sent. All that is set must
    agree; at least one has to be."""

    min_logprob: Annotated[float, Meta(ge=-100, le=0)] | None = None
    """Least mean log-probability per token (`hitsend routes calibrate` finds it)."""
    regex: str | None = None
    """What the whole answer must match (Python's syntax)."""
    schema: str | None = None
    """`json`: the answer must be JSON. Or a JSON schema's text: type, enum, const, required, properties, items."""
    judge: str | None = None
    """A served model that is asked whether the answer is right, and must begin with `yes`."""
    code: str | None = None
    """`module:function` of this server's Python path, called with (question, answer); true accepts."""
    code_timeout_s: Seconds = 2.0
    bills_drafts: bool = False
    """Whether callers also pay for answers that were rejected; else those are in the ledger under nobody's key."""


class RouteSettings(Section, frozen=True):
    """`[[routes]]`: a model name that stands for engines. Tables go by the names in `engines`.

    `engines` are served models, or names of engines that serve one. Whoever may use the route's name may use it,
    whatever its engines are. Clients can change none of this.
    """

    model: str
    """The name that clients ask for."""
    engines: tuple[str, ...]
    strategy: Strategy = "fallback"
    """fallback: in order. weighted: by `weights`. cheapest: this request's tokens at today's prices. fastest: recent
    time to the first token. prompt_length: the first whose `prompt_tokens` are enough. thinking: `thinking_engine` if
    thoughts are wanted. budget: the first whose `budget_left` the caller still has. time_of_day: by `hours`. canary,
    cascade: see there. Whatever chooses, the others follow when that one fails before the first byte."""
    weights: dict[str, Annotated[float, Meta(ge=0)]] = {}  # noqa: RUF012  # msgspec copies it
    """Without one: 1."""
    prompt_tokens: dict[str, Positive] = {}  # noqa: RUF012  # msgspec copies it
    """The longest prompt (estimated) that goes to it; without one: any."""
    thinking_engine: str | None = None
    """Without it, the last of `engines`."""
    budget_left: dict[str, Share] = {}  # noqa: RUF012  # msgspec copies it
    """Used while the caller's tightest budget has at least this share left; without one: always."""
    hours: dict[str, str] = {}  # noqa: RUF012  # msgspec copies it
    """UTC, `22:00-06:00`; without one: always."""
    figures_window_s: Seconds = 600.0
    """How long a measured time to the first token counts for `fastest`; an engine without one is tried first."""
    falls_back: bool = True
    """false: only the chosen one is asked."""
    unsupported: Literal["next", "refuse"] = "next"
    """A request that the chosen engine can't serve as asked: the next one that can, or a 400 that names the field."""
    thinking: Literal["leave", "on", "off"] = "leave"
    """What becomes of the client's wish for thoughts."""
    shadow: str | None = None
    """An engine or served model that gets a copy of each request; its answer is recorded and goes to nobody."""
    shadow_share: Share = 1.0
    shadow_concurrent: Positive = 4
    """Copies that run at once; a request that finds so many is not copied."""
    operator_usd_per_day: Annotated[float, Meta(ge=0)] | None = None
    """What it may cost the operator on a UTC day: shadow copies, judges, and what no caller pays for of drafts and of
    engines that were given up. Above it nothing is copied or drafted, and a judge that can't be asked rejects. Without
    it: as much as the budgets for everybody leave."""
    canary: CanarySettings = CanarySettings()
    cascade: CascadeSettings = CascadeSettings()
