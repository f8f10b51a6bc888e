"""Drafts from a head that the model itself has for guessing ahead, and two ways of guessing beside each other.

A head's guesses are the likeliest tokens it sees, no random choices, so the exact rule of `verify.py` holds. How far it
is believed is `trust.py`'s.

Enters: sequences. Leaves: guesses, and who made them. Always true: what a sequence's drafts are like follows from
itself alone and from what was measured at the start, so the same seed gives the same passes again. Next: `verify.py`.
"""

from collections.abc import Sequence as Items
from typing import Protocol

from hitsend.core.drafts import Drafted
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.trust import FIRST_CHANCE, Trusts
from hitsend.serve.loop.verify import Proposer

BOLD_CHANCE = 0.85
"""How often a head is believed to be right before anything is known of it, where wrong guesses cost so much that nobody
would ever try otherwise."""


class Head(Protocol):
    """Something that knows what each slot holds."""

    def draft(self, asked: dict[int, int], length: int) -> dict[int, tuple[int, ...]]:
        """Slot to its pending token: up to so many tokens that may follow, for the slots it can say something of."""
        ...

    def seconds(self, count: int, length: int) -> float:
        """What that takes for so many slots."""
        ...


class OwnHead:
    """See `verify.Proposer`."""

    def __init__(self, head: Head, first_chance: float = FIRST_CHANCE) -> None:
        self._head = head
        self._trusts = Trusts(first_chance)

    def name_for(self, sequence: Sequence) -> str:  # noqa: ARG002  # the protocol's
        """The one name it has."""
        return "mtp"

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """As far as its last guesses for each were right."""
        return self._trusts.chances(sequences)

    def longest(self, sequences: list[Sequence]) -> int:
        """One token, until one was right."""
        return self._trusts.longest(sequences)

    def propose(self, sequences: list[Sequence], length: int) -> list[tuple[int, ...]]:
        """The likeliest tokens, one after the other."""
        drafts = self._head.draft({each.held_slot: each.token_ids[-1] for each in sequences}, length)
        return [drafts.get(each.held_slot, ()) for each in sequences]

    def seconds(self, count: int, length: int) -> float:
        """So many passes through the head."""
        return self._head.seconds(count, length)

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """What became of a draft."""
        self._trusts.learn(sequence, drafted)


class Likelier:
    """For each sequence the one of several ways of guessing that is likelier right now; the first one, if both are."""

    def __init__(self, ways: Items[Proposer]) -> None:
        self._ways = ways
        self._chosen: dict[int, Proposer] = {}
        self._counts: dict[int, int] = {}

    def name_for(self, sequence: Sequence) -> str:
        """Of the one whose guess it was."""
        return self._way_of(sequence).name_for(sequence)

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """The best ones."""
        tables = [way.chances(sequences) for way in self._ways]
        if not any(map(any, tables)):
            return tables[0]  # as in most steps: nobody has a guess to be compared
        best = [max(range(len(tables)), key=lambda way: table[way]) for table in zip(*tables, strict=True)]
        self._chosen = {each.arrival: self._ways[way] for each, way in zip(sequences, best, strict=True)}
        self._counts = {way: best.count(way) for way in range(len(tables))}
        return [tables[way][place] for place, way in enumerate(best)]

    def longest(self, sequences: list[Sequence]) -> int:
        """The longest that one of those bears whose turn it is."""
        asked: dict[Proposer, list[Sequence]] = {}
        for each in sequences:
            asked.setdefault(self._way_of(each), []).append(each)
        return max(way.longest(own) for way, own in asked.items())

    def propose(self, sequences: list[Sequence], length: int) -> list[tuple[int, ...]]:
        """Each from its own."""
        drafts: dict[int, tuple[int, ...]] = {}
        for way in self._ways:
            own = [each for each in sequences if self._way_of(each) is way]
            if own:
                drafts.update(zip((each.arrival for each in own), way.propose(own, length), strict=True))
        return [drafts[each.arrival] for each in sequences]

    def seconds(self, count: int, length: int) -> float:
        """As if those that get drafts were spread like all are."""
        total = sum(self._counts.values()) or 1
        shares = ((way, -(-count * self._counts.get(place, 0) // total)) for place, way in enumerate(self._ways))
        return sum(way.seconds(share, length) for way, share in shares if share)

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """Whose guess it was."""
        self._way_of(sequence).learn(sequence, drafted)

    def _way_of(self, sequence: Sequence) -> Proposer:
        return self._chosen.get(sequence.arrival, self._ways[0])
