"""What is granted to a level or a key, and how people write it: limits, amounts of money, lengths of time.

Enters: values from the command line and from `/admin`. Leaves: frozen `Terms`, and the same in words. Always true: a
field that isn't mentioned stays as it is, None takes it away; money is exact, in integer micro-dollars (a value with a
seventh decimal is refused, not rounded); an error names the field and the value. Next: `principals.py`.
"""

import math
import re
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hitsend.core.errors import InvalidRequest
from hitsend.core.limits import Limits, Rate

MAX_MODELS = 256
MAX_NAME_CHARS = 128
MAX_MODEL_CHARS = 256
MAX_TIER = 9
MAX_USD = 1_000_000_000
MICROUSD = 1_000_000
MAX_INSTANT = 253_402_300_799.0
"""The last second of the year 9999."""

Tier = Annotated[int, Meta(ge=0, le=MAX_TIER)]
Usd = str | int | float
Parallel = Annotated[int, Meta(ge=1, le=1_000_000)]

_LENGTH = re.compile(r"(?P<count>[0-9]{1,9})(?P<unit>[smhd]?)", re.ASCII)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_COUNTS = tuple(name for name in Limits.__struct_fields__ if not name.endswith("_microusd"))
_BUDGETS = {"usd_per_day": "usd_per_day_microusd", "usd_per_month": "usd_per_month_microusd"}


class Terms(msgspec.Struct, frozen=True):
    """What is granted. `models` None: all; `tier` None: what the level above has (see `rights.py`)."""

    limits: Limits = Limits()
    models: tuple[str, ...] | None = None
    tier: int | None = None
    max_tier: int | None = None


class LimitsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits to set; null takes one away, what isn't named stays. USD as a decimal number or text, at most 6 places."""

    requests_per_minute: Rate | UnsetType | None = UNSET
    input_tokens_per_minute: Rate | UnsetType | None = UNSET
    output_tokens_per_minute: Rate | UnsetType | None = UNSET
    parallel_requests: Parallel | UnsetType | None = UNSET
    tokens_per_request: Rate | UnsetType | None = UNSET
    usd_per_day: Usd | UnsetType | None = UNSET
    usd_per_month: Usd | UnsetType | None = UNSET


class TermsChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Terms to set; null takes one away, what isn't named stays. Tier 0 is served first; `max_tier` is the best that a
    request may ask for."""

    limits: LimitsChange | UnsetType | None = UNSET
    models: tuple[str, ...] | UnsetType | None = UNSET
    tier: Tier | UnsetType | None = UNSET
    max_tier: Tier | UnsetType | None = UNSET


def changed(terms: Terms, change: TermsChange) -> Terms:
    """The terms after a change. Raises InvalidRequest."""
    limits = Limits() if change.limits is None else terms.limits
    if isinstance(change.limits, LimitsChange):
        limits = msgspec.structs.replace(limits, **_given(change.limits))
    models = checked_models(change.models)
    return Terms(
        limits=limits,
        models=terms.models if models is UNSET else models,
        tier=terms.tier if change.tier is UNSET else change.tier,
        max_tier=terms.max_tier if change.max_tier is UNSET else change.max_tier,
    )


def checked_models(models: tuple[str, ...] | UnsetType | None) -> tuple[str, ...] | UnsetType | None:
    """The names of models, each once. Raises InvalidRequest for names that can't be one."""
    if models is None or models is UNSET:
        return models
    if len(models) > MAX_MODELS:
        raise InvalidRequest(f"models has {len(models)} names, limit {MAX_MODELS}", param="models")
    for index, name in enumerate(models):
        if not name or not name.isprintable() or name != name.strip() or len(name) > MAX_MODEL_CHARS:
            where = f"models[{index}]"
            raise InvalidRequest(f"{where} must be printable text of at most {MAX_MODEL_CHARS} characters", param=where)
    return tuple(dict.fromkeys(models))


def check_name(field: str, value: str | None) -> None:
    """A name for people: short, printable. Raises InvalidRequest."""
    if value is None and field != "name":
        return
    if not value or not value.isprintable() or value != value.strip():
        raise InvalidRequest(f"{field} must be printable text without spaces around it", param=field)
    if len(value) > MAX_NAME_CHARS:
        raise InvalidRequest(f"{field} has {len(value)} characters, limit {MAX_NAME_CHARS}", param=field)


def check_place(field: str, value: str | None) -> None:
    """A name of an organisation, application or user: it is also a part of a path. Raises InvalidRequest."""
    check_name(field, value)
    if value is not None and ("/" in value or value in (".", "..")):
        raise InvalidRequest(f"{field} must not hold a slash, nor be . or ..", param=field)


def shown_limits(limits: Limits) -> dict[str, int | str]:
    """The limits that are set, as `LimitsChange` would be written; USD as exact text."""
    shown: dict[str, int | str] = {name: value for name in _COUNTS if (value := getattr(limits, name)) is not None}
    for name, field in _BUDGETS.items():
        amount = getattr(limits, field)
        if amount is not None:
            shown[name] = usd_text(amount)
    return shown


def usd_text(microusd: int) -> str:
    """Micro-dollars as exact dollars, without needless zeros: 1500000 is 1.5."""
    whole, rest = divmod(microusd, MICROUSD)
    return f"{whole}.{rest:06d}".rstrip("0").rstrip(".")


def microusd(field: str, value: Usd) -> int:
    """Dollars as exact micro-dollars. Raises InvalidRequest that names the field and the value."""
    written = value if isinstance(value, str) else repr(value)
    right = f"{field} must be an amount of USD from 0 to {MAX_USD} with at most 6 decimals, not {written[:40]!r}"
    try:
        amount = Decimal(written) if len(written) <= 24 and re.fullmatch(r"[0-9.eE+-]+", written, re.ASCII) else None
    except InvalidOperation:
        amount = None
    if amount is None or not 0 <= amount <= MAX_USD or amount * MICROUSD != int(amount * MICROUSD):
        raise InvalidRequest(right, param=field)
    return int(amount * MICROUSD)


def seconds(field: str, text: str) -> float:
    """A length of time such as 90s, 15m, 24h or 30d. Raises InvalidRequest."""
    found = _LENGTH.fullmatch(text)
    if found is None:
        raise InvalidRequest(
            f"{field} must be a length of time such as 90s, 24h or 30d, not {text[:40]!r}", param=field
        )
    return float(int(found["count"]) * _UNITS[found["unit"]])


def instant(field: str, written: str | float, now: float) -> float:
    """An instant to come, in seconds since the epoch: from such a number, a length from now, or an ISO date or time.

    A date is its first moment; without an offset it is UTC. Raises InvalidRequest.
    """
    if isinstance(written, str) and _LENGTH.fullmatch(written) is not None:
        at = now + seconds(field, written)
    elif isinstance(written, str):
        try:
            read = datetime.fromisoformat(written[:64])
        except ValueError as error:
            text = f"{field} must be like 30d, 2030-01-31 or 2030-01-31T12:00:00Z, not {written[:40]!r}"
            raise InvalidRequest(text, param=field) from error
        at = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    else:
        at = float(written)
    if not math.isfinite(at) or not now < at <= MAX_INSTANT:
        raise InvalidRequest(f"{field} must lie in the future and before the year 10000, not {written!r}", param=field)
    return at


def _given(change: LimitsChange) -> dict[str, Any]:
    """The fields of `Limits` that a change names."""
    given = {name: value for name in _COUNTS if (value := getattr(change, name)) is not UNSET}
    for name, field in _BUDGETS.items():
        value = getattr(change, name)
        if value is not UNSET:
            given[field] = None if value is None else microusd(f"limits.{name}", value)
    return given
