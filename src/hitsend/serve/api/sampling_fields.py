"""Sampling fields beyond OpenAI's, the same on every endpoint that generates text.

Enters: the wire's values, as a struct that an endpoint's body inherits. Leaves: values in range. Always true: names and
meanings are llama-server's (DRY, XTC, typical_p) and vLLM's (the rest), ranges are checked here; what isn't built is
known here, so that it is refused by name. Next: `chat_messages.py`.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import SamplingAsked

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Breaker = Annotated[str, Meta(min_length=1, max_length=64)]


class SamplingIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None is "not given" and JSON's null."""

    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Meta(ge=1, le=8)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=64)] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Meta(max_length=16)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    min_tokens: TokenId | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    dry_penalty_last_n: Any = None
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None


REFUSED = {
    "dry_penalty_last_n": "DRY looks at the whole sequence",
    "mirostat": "it adapts to what was drawn before and replaces every other filter; min_p or top_p bound surprise too",
    "mirostat_tau": "it belongs to mirostat",
    "mirostat_eta": "it belongs to mirostat",
}
"""Fields of other servers that aren't served, and why."""


def check_sampling(wire: SamplingIn, max_tokens: int | None) -> None:
    """Refuse what isn't served or contradicts itself. Raises InvalidRequest."""
    for field, reason in REFUSED.items():
        value = getattr(wire, field)
        is_off = value is None or (field == "mirostat" and value == 0)
        if not is_off:
            raise InvalidRequest(f"{field} is not supported: {reason}", param=field)
    if max_tokens is not None and (wire.min_tokens or 0) > max_tokens:
        text = f"min_tokens is {wire.min_tokens} and max_tokens is {max_tokens}"
        raise InvalidRequest(text, param="min_tokens")


def with_extensions(asked: SamplingAsked, wire: SamplingIn) -> SamplingAsked:
    """`asked` with what `wire` says about the filters of this file."""
    breakers = wire.dry_sequence_breakers
    return msgspec.structs.replace(
        asked,
        typical_p=wire.typical_p,
        dry_multiplier=wire.dry_multiplier,
        dry_base=wire.dry_base,
        dry_allowed_length=wire.dry_allowed_length,
        dry_sequence_breakers=None if breakers is None else tuple(dict.fromkeys(breakers)),
        xtc_probability=wire.xtc_probability,
        xtc_threshold=wire.xtc_threshold,
    )
