"""How many connections may be open, and who still gets in when they all are.

Enters: the peers' addresses, as connections begin and end. Leaves: whether a connection is served. Always true: beyond
`max_connections` at most `EXTRA` more are read, and served only where an operator needs them (health, metrics, state,
administration); whoever comes after those is told and let go at once, so file descriptors and memory stay bounded
whatever clients do. Next: `connection.py`.
"""

import logging
import time
from typing import Literal

logger = logging.getLogger(__name__)

EXTRA = 32
"""Connections beyond the limit that are read as far as their heads."""

LINGER_S = 1.0
"""How long a refused client may take to read why, before its connection is closed under it."""

MOST_LINGERING = 64
"""So many refused ones at a time; beyond that there is no wait."""

_LOG_EVERY_S = 60.0
_ALWAYS = ("/healthz", "/readyz", "/metrics", "/inspect/state", "/admin/")

Place = Literal["served", "extra", "refused"]


class Doors:
    """Counts connections. `most_per_address` None: an address has no bound of its own (all may come by one proxy)."""

    def __init__(self, most: int, most_per_address: int | None = None) -> None:
        self.num_open = 0
        self.num_refused = 0
        self.num_lingering = 0
        self._most = most
        self._most_per_address = most_per_address
        self._by_address: dict[str, int] = {}
        self._logged_at = float("-inf")

    @property
    def is_full(self) -> bool:
        """Whether more than the limit are open."""
        return self.num_open > self._most

    def enter(self, address: str) -> Place:
        """A connection begins. Unless it is refused, `leave` has to follow."""
        mine = self._by_address.get(address, 0)
        is_too_many = self._most_per_address is not None and mine >= self._most_per_address
        if is_too_many or self.num_open >= self._most + EXTRA:
            self._refused()
            return "refused"
        self._by_address[address] = mine + 1
        self.num_open += 1
        return "extra" if self.is_full else "served"

    def leave(self, address: str) -> None:
        """It has ended."""
        self.num_open -= 1
        left = self._by_address[address] - 1
        if left:
            self._by_address[address] = left
        else:
            del self._by_address[address]

    def may_pass(self, target: bytes) -> bool:
        """Whether an extra connection's request is served, given its request target."""
        if not self.is_full or target.startswith(tuple(each.encode() for each in _ALWAYS)):
            return True
        self._refused()
        return False

    def _refused(self) -> None:
        self.num_refused += 1
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            logger.warning(
                "connections are refused: %d are open (server.max_connections %d)", self.num_open, self._most
            )
