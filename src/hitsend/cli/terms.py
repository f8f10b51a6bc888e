"""The flags that say what is granted: limits, budgets, models, tiers.

Enters: what was typed. Leaves: a `TermsChange`. Always true: each flag stands on every command that sets terms, with
one meaning; `none` takes a limit away, a flag that isn't given leaves it as it is; a wrong value is one line that names
the flag. Next: `keys.py`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from msgspec import UNSET

from hitsend.cli import CallFailed
from hitsend.core.errors import ServeError
from hitsend.core.limits import Rate
from hitsend.serve.access.terms import LimitsChange, Parallel, TermsChange, Tier, checked_models, microusd

T = TypeVar("T")

NONE = "none"
_Text = str | None


def _flag(name: str, metavar: str, words: str) -> Any:
    return Annotated[_Text, typer.Option(name, metavar=metavar, help=words)]


FLAGS: dict[str, tuple[str, Any]] = {
    "rpm": ("requests_per_minute", _flag("--rpm", "N", "Requests per minute; none: no limit.")),
    "input_tpm": ("input_tokens_per_minute", _flag("--input-tpm", "N", "Input tokens per minute.")),
    "output_tpm": ("output_tokens_per_minute", _flag("--output-tpm", "N", "Output tokens per minute.")),
    "parallel": ("parallel_requests", _flag("--parallel", "N", "Requests at once.")),
    "request_tokens": ("tokens_per_request", _flag("--request-tokens", "N", "Input and allowed output of a request.")),
    "usd_day": ("usd_per_day", _flag("--usd-day", "X", "Budget per UTC day.")),
    "usd_month": ("usd_per_month", _flag("--usd-month", "X", "Budget per UTC month.")),
    "models": ("models", _flag("--models", "A,B", "The only models that may be used; none: all.")),
    "tier": ("tier", _flag("--tier", "0-9", "Class of service, 0 is served first; none: as above.")),
    "max_tier": ("max_tier", _flag("--max-tier", "0-9", "The best tier that a request may ask for.")),
}
"""Parameter -> (field of a change, flag)."""

_COUNTS: dict[str, Any] = {"parallel_requests": Parallel, "tier": Tier, "max_tier": Tier}


def taking_terms(command: Callable[..., T]) -> Callable[..., T]:
    """The command with all of `FLAGS`; what they come to is handed to it as `terms`."""

    @wraps(command)
    def wrapped(**given: Any) -> T:
        flags = {name: given.pop(name) for name in FLAGS}
        return command(**given, terms=change_of(flags))

    signature = inspect.signature(command)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "terms"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=flag)
        for name, (_, flag) in FLAGS.items()
    ]
    kept = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in kept]
    # typer reads a command's flags from both
    wrapped.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]  # any function has it
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *added]}
    return wrapped


def change_of(flags: dict[str, str | None]) -> TermsChange:
    """The change that these flags (by parameter name) ask for. Raises CallFailed that names the flag."""
    limits: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, text in flags.items():
        if text is None:
            continue
        field = FLAGS[name][0]
        into = limits if field in LimitsChange.__struct_fields__ else others
        into[field] = None if text == NONE else _value(f"--{name.replace('_', '-')}", field, text)
    return TermsChange(limits=LimitsChange(**limits) if limits else UNSET, **others)


def is_empty(change: TermsChange) -> bool:
    """Whether nothing was asked for."""
    return all(value is UNSET for value in msgspec.structs.astuple(change))


def names_in(flag: str, text: str) -> tuple[str, ...]:
    """Names with commas between. Raises CallFailed."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise CallFailed(f"{flag}: expected names with commas between, or none, not {text!r}")
    return names


def _value(flag: str, field: str, text: str) -> Any:
    try:
        if field == "models":
            return checked_models(names_in(flag, text))
        if field.startswith("usd"):
            microusd(flag, text)
            return text
    except ServeError as error:
        raise CallFailed(error.message if error.message.startswith(flag) else f"{flag}: {error.message}") from error
    kind = _COUNTS.get(field, Rate)
    try:
        return msgspec.convert(int(text) if text.isascii() and text.isdigit() else text, kind)
    except (msgspec.ValidationError, ValueError) as error:
        raise CallFailed(f"{flag}: expected {_expected(kind)} or none, not {text[:40]!r}") from error


def _expected(kind: Any) -> str:
    meta = kind.__metadata__[0]
    return f"a whole number from {meta.ge} to {meta.le}"
