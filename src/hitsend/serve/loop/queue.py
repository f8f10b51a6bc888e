"""The waiting queue: whose turn it is, and who yields when it is full.

The head is found from the outermost level of the tenants down: at each level the better tier first (0 is the best),
then who runs least, then who got least lately (`shares.py`). Within one tenant: the better tier, then first come.

Nothing starves. Whoever waits and gets nothing goes up a tier for each `aging_s`, without an end: after (t + 1) times
`aging_s`, a level whose tier is t goes before every sibling that was served since; its siblings are finitely many, so
its turn comes, at each level and so for the leaf. Within a tenant the same holds by the time that each request waited:
only those that came before, or at most (t + 1) times `aging_s` after it, can go before it.

Enters: sequences that have no place. Leaves: the head, and who is displaced. Always true: the preempted go before all
others, in the order of their arrival; the paused wait, but have no turn; finding the head costs one pass over the
tenants of one level per level, whatever each of them has waiting. Next: `scheduler.py`.
"""

from bisect import insort
from collections.abc import Iterator
from math import floor

from hitsend.core.lifecycle import State
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.shares import Path, Shares, Tenant, most_waiting


class WaitingQueue:
    """Sequences without a place. `shares` is told who waits."""

    def __init__(self, shares: Shares, aging_s: float) -> None:
        self._shares = shares
        self._aging_s = aging_s
        self._preempted: list[Sequence] = []
        self._paused: list[Sequence] = []
        self._queues: dict[Path, dict[int, list[Sequence]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._paused
        for queues in self._queues.values():
            for queue in queues.values():
                yield from queue

    def add(self, sequence: Sequence, at: float) -> None:
        """Into its place."""
        self._size += 1
        if sequence.state is State.PREEMPTED:
            insort(self._preempted, sequence, key=_arrival)
        elif sequence.is_paused:
            self._paused.append(sequence)
        else:
            queue = self._queues.setdefault(sequence.path, {}).setdefault(sequence.tier, [])
            insort(queue, sequence, key=_arrival)
            self._shares.wait(sequence.path, sequence.tier, 1, at)

    def remove(self, sequence: Sequence, at: float) -> None:
        """Out of it. Raises ValueError for one that isn't there."""
        if sequence.state is State.PREEMPTED:
            self._preempted.remove(sequence)
        elif sequence.is_paused:
            self._paused.remove(sequence)
        else:
            queues = self._queues[sequence.path]
            queues[sequence.tier].remove(sequence)
            if not queues[sequence.tier]:
                del queues[sequence.tier]
            if not queues:
                del self._queues[sequence.path]
            self._shares.wait(sequence.path, sequence.tier, -1, at)
        self._size -= 1

    def head(self, at: float) -> Sequence | None:
        """Whose turn it is."""
        for sequence in self._preempted:
            if not sequence.is_paused:
                return sequence
        if not self._queues:
            return None
        path: Path = ()
        node = self._shares.root
        while node.children:
            name, node = min(_waiting_children(node), key=lambda child: child[1].rank(at, self._aging_s))
            path = (*path, name)
        heads = [queue[0] for queue in self._queues[path].values()]
        return min(heads, key=lambda each: (each.tier - floor((at - each.arrived_at) / self._aging_s), each.arrival))

    def displaced_by(self, newcomer: Path, number: int, excess: int) -> list[Sequence]:
        """At least `excess` sequences that yield to `number` of a newcomer, or none: then it is the newcomer.

        They are the newest whole requests, of the worst tier, of whoever has the most waiting; none of them has begun.
        """
        waiting = {path: sum(map(len, queues.values())) for path, queues in self._queues.items()}
        displaced: list[Sequence] = []
        while len(displaced) < excess:
            path = most_waiting(waiting, newcomer, number)
            victim = None if path == newcomer else self._newest(path, displaced)
            if victim is None:
                return []
            displaced += victim.siblings
            waiting[path] -= len(victim.siblings)
        return displaced

    def _newest(self, path: Path, but: list[Sequence]) -> Sequence | None:
        queues = self._queues.get(path, {})
        for tier in sorted(queues, reverse=True):
            for sequence in reversed(queues[tier]):
                if sequence not in but and all(each.admitted_at is None for each in sequence.siblings):
                    return sequence
        return None


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _waiting_children(node: Tenant) -> list[tuple[str, Tenant]]:
    return [(name, child) for name, child in node.children.items() if child.num_waiting]
