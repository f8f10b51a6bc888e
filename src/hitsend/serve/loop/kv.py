"""Cells and slots: what is taken, by whom, and the proof that nothing gets lost.

Cells here are an accounting unit over libllama's cells (one cell: one token's attention KV), not paged memory: which
physical cell holds a token is libllama's affair; this file only makes sure that it is never asked for more than it has.

A slot that was given up may be *kept*: it is free, and its filled cells stay until somebody needs slot or cells. Kept
cells count as free; who takes empties them first (`seats.py`).

Enters: takings, growth, fillings, releases. Leaves: slot numbers, free counts, `check()`. Always true: free cells plus
held cells are all cells, kept cells are among the free ones, filled <= held <= cells_per_slot in every slot. Per-stream
and unified mode need no branches: when num_cells == num_slots * cells_per_slot the shared count can't run out before
the slot does. Next: `scheduler.py`.
"""

import heapq
from collections.abc import Mapping


class AccountingBroken(Exception):
    """A bug in hitsend: cells or slots were asked for or given back twice."""


class CellPool:
    """The books over all slots and cells. A *held* cell is taken from the pool; it is *filled* by a computed token."""

    def __init__(self, num_slots: int, num_cells: int, cells_per_slot: int) -> None:
        if num_cells > num_slots * cells_per_slot:
            raise AccountingBroken(f"{num_cells} cells don't fit {num_slots} slots of {cells_per_slot}")
        self.num_slots = num_slots
        self.num_cells = num_cells
        self.cells_per_slot = cells_per_slot
        self.num_free_cells = num_cells
        self._free_slots = list(range(num_slots))
        self._held: dict[int, int] = {}
        self._filled: dict[int, int] = {}
        self._kept: dict[int, int] = {}

    @property
    def is_shared(self) -> bool:
        """Whether the slots compete for cells (unified mode)."""
        return self.num_cells < self.num_slots * self.cells_per_slot

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens that one sequence can ever have, alone on the engine."""
        return min(self.cells_per_slot, self.num_cells)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free_slots)

    @property
    def num_held_slots(self) -> int:
        """Slots that somebody holds."""
        return len(self._held)

    @property
    def num_held_cells(self) -> int:
        """Cells that are not free, filled or not yet."""
        return self.num_cells - self.num_free_cells

    @property
    def num_kept_cells(self) -> int:
        """Free cells that still hold what a sequence left."""
        return sum(self._kept.values())

    @property
    def num_empty_cells(self) -> int:
        """Free cells that hold nothing."""
        return self.num_free_cells - self.num_kept_cells

    @property
    def num_unfilled_cells(self) -> int:
        """Cells that hold nothing, whoever's they are."""
        return self.num_cells - self.num_kept_cells - sum(self._filled.values())

    def free_slots(self) -> tuple[int, ...]:
        """All that nobody holds, kept ones too."""
        return tuple(self._free_slots)

    def held_slots(self) -> tuple[int, ...]:
        """All that somebody holds."""
        return tuple(self._held)

    def is_free(self, slot: int) -> bool:
        """Whether nobody holds the slot."""
        return slot not in self._held

    def can_take(self, num_cells: int) -> bool:
        """Whether `take` would succeed now."""
        return bool(self._free_slots) and num_cells <= min(self.num_free_cells, self.cells_per_slot)

    def take(self, num_cells: int, slot: int | None = None) -> int:
        """Hold that many cells and a free slot, and return it: the lowest one keeps the held ones together."""
        if not self.can_take(num_cells) or num_cells > self.num_empty_cells:
            raise AccountingBroken(
                f"{num_cells} cells: {self.num_empty_cells} and {self.num_free_slots} slots are free"
            )
        if slot is None:
            slot = self._free_slots[0]
        if slot not in self._free_slots or slot in self._kept:
            raise AccountingBroken(f"slot {slot} is not free and empty")
        self._free_slots.remove(slot)
        heapq.heapify(self._free_slots)
        self._held[slot] = num_cells
        self._filled[slot] = 0
        self.num_free_cells -= num_cells
        return slot

    def needs_cell(self, slot: int) -> bool:
        """Whether the slot's next token needs a cell beyond those that it holds."""
        return self._filled[slot] >= self._held[slot]

    def hold_next(self, slot: int) -> bool:
        """Make sure that the slot holds a cell for its next token; False when there is none left for it."""
        if self._filled[slot] < self._held[slot]:
            return True
        if self.num_empty_cells < 1 or self._held[slot] >= self.cells_per_slot:
            return False
        self._held[slot] += 1
        self.num_free_cells -= 1
        return True

    def fill(self, slot: int, num_tokens: int) -> None:
        """Tokens of this slot were computed into cells that it holds."""
        filled = self._filled[slot] + num_tokens
        if filled > self._held[slot]:
            raise AccountingBroken(f"slot {slot} fills {filled} cells and holds {self._held[slot]}")
        self._filled[slot] = filled

    def release(self, slot: int) -> None:
        """Give the slot and all its cells back."""
        if slot not in self._held:
            raise AccountingBroken(f"slot {slot} is not held")
        self.num_free_cells += self._held.pop(slot)
        del self._filled[slot]
        heapq.heappush(self._free_slots, slot)

    def keep(self, slot: int) -> None:
        """Give the slot and its cells back, but leave what was computed where it is."""
        filled = self._filled[slot]
        self.release(slot)
        self._kept[slot] = filled

    def drop_kept(self, slot: int) -> None:
        """What lay there is gone, or somebody's."""
        if slot not in self._kept:
            raise AccountingBroken(f"slot {slot} keeps nothing")
        del self._kept[slot]

    def move(self, source: int, target: int) -> None:
        """The whole holding of one slot goes to a free one."""
        if source not in self._held or target in self._held or target in self._kept:
            raise AccountingBroken(f"can't move slot {source} to slot {target}")
        self._held[target] = self._held.pop(source)
        self._filled[target] = self._filled.pop(source)
        self._free_slots.remove(target)
        self._free_slots.append(source)
        heapq.heapify(self._free_slots)

    def check(self, computed: Mapping[int, int] | None = None, kept: Mapping[int, int] | None = None) -> list[str]:
        """What is wrong with the books: nothing, or one sentence each.

        `computed` (slot → computed tokens of the sequence that says it lives there) is compared with them where given,
        and `kept` (slot → tokens that the prefix cache says lie there).
        """
        problems = []
        held = sum(self._held.values())
        if held + self.num_free_cells != self.num_cells:
            problems.append(f"{held} cells held and {self.num_free_cells} free are not {self.num_cells}")
        if sorted([*self._free_slots, *self._held]) != list(range(self.num_slots)):
            problems.append(f"slots {sorted(self._free_slots)} free and {sorted(self._held)} held are not all slots")
        if self.num_empty_cells < 0 or not self._kept.keys() <= set(self._free_slots):
            problems.append(f"kept {dict(sorted(self._kept.items()))} don't fit {self.num_free_cells} free cells")
        for slot, cells in sorted(self._held.items()):
            if not 0 <= self._filled[slot] <= cells <= self.cells_per_slot:
                problems.append(f"slot {slot}: {self._filled[slot]} filled, {cells} held, limit {self.cells_per_slot}")
        if computed is not None and dict(computed) != self._filled:
            problems.append(f"sequences computed {dict(sorted(computed.items()))}, slots hold {self._filled}")
        if kept is not None and dict(kept) != self._kept:
            problems.append(f"cached {dict(sorted(kept.items()))}, slots keep {self._kept}")
        return problems
