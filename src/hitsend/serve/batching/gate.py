"""When a line may begin: while there is room that nobody else wants.

Enters: what a line asks for, and how its engine is right now. Leaves: a place. Always true: lines never have more than
their share of an engine's slots; while others run, one begins only when no other line runs; none begins while anybody
waits for that engine, or while it has no slot free; those that wait at the gate pass in the order in which they came.
Next: `line.py`.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec

LOOK_S = 0.02
"""How often a full engine is looked at."""


class Lane(msgspec.Struct, frozen=True):
    """One engine as it is now."""

    name: str
    slots: int
    running: int
    waiting: int


class Gate:
    """Before all engines. `lane_of` finds a model's; None: nobody serves it, so its lines fail at once anyway."""

    def __init__(self, lane_of: Callable[[str | None], Lane | None], share: float, num_processes: int = 1) -> None:
        self._lane_of = lane_of
        self._share = share
        self._num_processes = num_processes
        self._used: defaultdict[str, int] = defaultdict(int)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def place(self, model: str | None, weight: int, is_halted: Callable[[], bool]) -> AsyncGenerator[None]:
        """Wait for room for `weight` choices (or all that lines may have) and keep it for the block; nobody waits any
        more once it `is_halted`."""
        lane = self._lane_of(model)
        if lane is None:
            yield
            return
        async with self._turns[lane.name]:
            while not self.has_room(lane, weight) and not is_halted():
                await asyncio.sleep(LOOK_S)
                lane = self._lane_of(model) or lane
            taken = min(weight, self._most(lane))
            self._used[lane.name] += taken
        try:
            yield
        finally:
            self._used[lane.name] -= taken

    def has_room(self, lane: Lane, weight: int) -> bool:
        """Whether a line may begin there now."""
        used, most = self._used[lane.name], self._most(lane)
        weight = min(weight, most)
        if lane.waiting or max(lane.running, used) + weight > max(lane.slots, 1):
            return False
        others_run = lane.running > used
        return used == 0 if others_run else used + weight <= most

    def _most(self, lane: Lane) -> int:
        return max(1, int(lane.slots * self._share) // self._num_processes)
