"""The query of routes that list things.

Enters: an exchange. Leaves: its parameters by name. Always true: a parameter that isn't known is refused by name, and
so is one that comes twice. Next: `files.py`.
"""

from collections.abc import Iterable
from urllib.parse import parse_qsl

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api.exchange import Exchange


def query_of(exchange: Exchange, known: Iterable[str]) -> dict[str, str]:
    """Raises InvalidRequest."""
    raw = exchange.scope.get("query_string", b"").decode("latin-1")
    found: dict[str, str] = {}
    for name, value in parse_qsl(raw, keep_blank_values=True):
        if name not in known:
            raise InvalidRequest(f"the query parameter {name[:64]!r} is not supported", param=name[:64])
        if name in found:
            raise InvalidRequest(f"{name}: more than one of them", param=name)
        if "\0" in value:  # as in `query.py`
            raise InvalidRequest(f"{name}: a zero byte is part of no name", param=name)
        found[name] = value
    return found


def read_limit(query: dict[str, str], *, default: int, most: int) -> int:
    """How many are wanted. Raises InvalidRequest."""
    given = query.get("limit", str(default))
    if not given.isascii() or not given.isdigit() or len(given) > len(str(most)) or not 1 <= int(given) <= most:
        raise InvalidRequest(f"limit: {given[:32]!r}, expected a number from 1 to {most}", param="limit")
    return int(given)
