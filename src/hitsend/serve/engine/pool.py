"""Which models are in memory: what is loaded next, and who has to make room for it.

Enters: predicted bytes, who is wanted, who is busy, the time. Leaves: a `Turn`: what to load and what to unload now.
Always true: what is loaded, being loaded or not gone yet never takes more than the budget; a model with requests is
never unloaded, nor one that is pinned; of those at rest the least recently used goes first, and no more go than the
room that is needed; models are loaded in the order in which they were wanted, so that a small one can't keep a large
one out for ever; when the first of them has waited for `patience_s`, busy ones in its way take no new requests until
they are out of the way. Pure: it decides, `pooled.py` acts. Next: `pooled.py`.
"""

from typing import Literal

import msgspec

from hitsend.core.errors import ConfigError

Stage = Literal["unloaded", "loading", "loaded", "unloading"]


class Member(msgspec.Struct):
    """One model. `num_bytes` is what it takes when loaded, `idle_s` after which rest it goes (None: never)."""

    name: str
    num_bytes: int
    idle_s: float | None = None
    is_pinned: bool = False
    stage: Stage = "unloaded"
    is_busy: bool = False
    used_at: float = 0.0
    wanted_at: float | None = None
    is_closing: bool = False

    @property
    def is_at_rest(self) -> bool:
        """Whether it could go now."""
        return self.stage == "loaded" and not self.is_busy and not self.is_pinned


class Turn(msgspec.Struct, frozen=True):
    """What to do now. What is in it is marked as being done already."""

    unload: tuple[str, ...] = ()
    load: str | None = None


class Pool:
    """The members and their budget in bytes (None: no bound)."""

    def __init__(self, budget_bytes: int | None, patience_s: float) -> None:
        self.budget_bytes = budget_bytes
        self._patience_s = patience_s
        self._members: dict[str, Member] = {}

    def add(self, member: Member) -> None:
        """One more. Raises ConfigError where it could never be in memory, with the numbers."""
        self._members[member.name] = member
        if self.budget_bytes is None:
            return
        pinned = [each for each in self._members.values() if each.is_pinned]
        for each in self._members.values():
            beside = sum(other.num_bytes for other in pinned if other is not each)
            if each.num_bytes + beside > self.budget_bytes:
                raise ConfigError(
                    f"engine.memory_budget_bytes is {self.budget_bytes}: {each.name!r} takes {each.num_bytes} bytes "
                    f"(its whole process), beside {beside} of what always stays: "
                    f"{each.num_bytes + beside - self.budget_bytes} too many; lower its num_slots, context or "
                    "kv_budget_bytes"
                )

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    @property
    def used_bytes(self) -> int:
        """What is set aside now."""
        return sum(each.num_bytes for each in self._members.values() if each.stage != "unloaded")

    def fits(self, member: Member) -> bool:
        """Whether it could be loaded now, without unloading anything."""
        return self._lacking(member) <= 0

    def want(self, name: str, now: float) -> None:
        """Somebody waits for it; the first wish counts."""
        member = self._members[name]
        member.wanted_at = now if member.wanted_at is None else member.wanted_at

    def turn(self, now: float) -> Turn:
        """What is to be done now; ask again after every change, and after `next_look`."""
        going = [each for each in self._members.values() if _is_overdue(each, now)]
        for each in going:
            each.stage = "unloading"
        for each in self._members.values():
            each.is_closing = False
        first = self._first()
        if first is None:
            return Turn(_names(going))
        if self._lacking(first) <= 0:
            first.stage, first.wanted_at, first.used_at = "loading", None, now
            return Turn(_names(going), first.name)
        going += self._make_room(first, now)
        return Turn(_names(going))

    def next_look(self, now: float) -> float | None:
        """Seconds until time alone changes something; None: never."""
        dues = [each.used_at + each.idle_s for each in self._members.values() if each.is_at_rest and each.idle_s]
        first = self._first()
        if first is not None and first.wanted_at is not None and now < first.wanted_at + self._patience_s:
            dues.append(first.wanted_at + self._patience_s)
        return max(0.0, min(dues) - now) if dues else None

    def _first(self) -> Member | None:
        """Who has been wanted longest and isn't there."""
        wanted = [each for each in self._members.values() if each.wanted_at is not None and each.stage == "unloaded"]
        return min(wanted, key=lambda each: each.wanted_at or 0.0, default=None)

    def _lacking(self, first: Member) -> int:
        """Bytes that it still needs."""
        return 0 if self.budget_bytes is None else self.used_bytes + first.num_bytes - self.budget_bytes

    def _make_room(self, first: Member, now: float) -> list[Member]:
        """Who goes for it. Where that isn't enough nobody does, and when its patience is over, busy ones close."""
        loaded = [each for each in self._members.values() if each.stage == "loaded" and not each.is_pinned]
        leaving = sum(each.num_bytes for each in self._members.values() if each.stage == "unloading")
        lacking = self._lacking(first) - leaving
        at_rest = sorted((each for each in loaded if not each.is_busy), key=lambda each: each.used_at)
        going = _enough(at_rest, lacking)
        if going is not None:
            for each in going:
                each.stage = "unloading"
            return going
        if first.wanted_at is not None and now >= first.wanted_at + self._patience_s:
            busy = sorted((each for each in loaded if each.is_busy), key=lambda each: each.used_at)
            for each in _enough([*at_rest, *busy], lacking) or ():
                each.is_closing = True
        return []


def _is_overdue(member: Member, now: float) -> bool:
    return member.is_at_rest and member.idle_s is not None and now >= member.used_at + member.idle_s


def _enough(members: list[Member], lacking: int) -> list[Member] | None:
    """The first ones that give so many bytes, without those that aren't needed for it; None: all together don't."""
    chosen: list[Member] = []
    freed = 0
    for each in members:
        if freed >= lacking:
            break
        chosen.append(each)
        freed += each.num_bytes
    if freed < lacking:
        return None
    for each in reversed(chosen[:]):
        if freed - each.num_bytes >= lacking:
            chosen.remove(each)
            freed -= each.num_bytes
    return chosen


def _names(members: list[Member]) -> tuple[str, ...]:
    return tuple(each.name for each in members)
