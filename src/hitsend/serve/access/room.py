"""How long an answer can be that no level's limits rule out for ever.

Enters: levels, and the size of a request as far as it is known. Leaves: tokens per choice, or the error that nothing
will help. Always true: what is left at the moment has no say in it, only what the limits can ever contain.
Next: `memory.py`.
"""

from collections.abc import Iterable
from operator import itemgetter

import msgspec

from hitsend.core.limits import Level, LimitName
from hitsend.serve.access.limits import Refusal, never


class Size(msgspec.Struct, frozen=True):
    """What is known of a request before its answer's length is settled; prices are pico-dollars per token.

    `input_tokens` of all prompts together; `max_tokens` as the client set it, per choice.
    """

    input_tokens: int
    choices: int
    max_tokens: int | None = None
    input_picousd: int = 0
    output_picousd: int = 0
    input_param: str = "messages"

    def microusd(self, output_tokens: int) -> int:
        """The most that it can cost, rounded as bills are."""
        picousd = self.input_tokens * self.input_picousd + output_tokens * self.output_picousd
        return (picousd + 500_000) // 1_000_000


def most_output(levels: Iterable[Level], size: Size) -> int | None:
    """The longest answer, per choice, that no level's limits rule out for ever; None: no level says anything.

    Raises InvalidRequest when the input alone is too much, or the length that the client set.
    """
    rooms = [room for level in levels for room in _rooms(level, size)]
    if not rooms:
        return None
    room, level, name, value = min(rooms, key=itemgetter(0))
    wanted = size.choices * (size.max_tokens or 1)
    if wanted > room:
        asked = {"output_tokens_per_minute": wanted, "tokens_per_request": size.input_tokens + wanted}
        refusal = Refusal(level, name, value, asked.get(name, size.microusd(wanted)), value, None)
        if name == "input_tokens_per_minute":
            refusal = msgspec.structs.replace(refusal, asked=size.input_tokens)
        is_input = name != "output_tokens_per_minute" and (size.max_tokens is None or room < size.choices)
        raise never(refusal, size.input_param if is_input else "max_tokens")
    return None if room == _ANY else room // size.choices


_ANY = 2**62


def _rooms(level: Level, size: Size) -> Iterable[tuple[int, Level, LimitName, int]]:
    """How many tokens of answer each limit of the level can ever hold beside the input; -1: not even the input."""
    limits = level.limits
    if (most := limits.input_tokens_per_minute) is not None:
        yield _ANY if size.input_tokens <= most else -1, level, "input_tokens_per_minute", most
    if (most := limits.output_tokens_per_minute) is not None:
        yield most, level, "output_tokens_per_minute", most
    if (most := limits.tokens_per_request) is not None:
        yield most - size.input_tokens, level, "tokens_per_request", most
    budgets: tuple[tuple[LimitName, int | None], ...] = (
        ("usd_per_day", limits.usd_per_day_microusd),
        ("usd_per_month", limits.usd_per_month_microusd),
    )
    for name, budget in budgets:
        if budget is not None:
            yield _affordable(budget, size), level, name, budget


def _affordable(microusd: int, size: Size) -> int:
    if not size.output_picousd:
        return _ANY if size.microusd(0) <= microusd else -1
    left_picousd = microusd * 1_000_000 + 499_999 - size.input_tokens * size.input_picousd
    return left_picousd // size.output_picousd
