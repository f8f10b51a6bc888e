"""Who of those that share the engine has had how much of it: a tree of tenants, one level per element of their path.

Enters: what waits, what runs, and the tokens that each step computed. Leaves: an order at each level. Always true: what
somebody got counts half after `HALF_LIFE_S`, so nobody pays for long ago and nobody saves up; a level is compared with
its siblings only, so an organisation of a hundred users has one share; whoever neither waits nor runs, and has had
nothing to speak of lately, is forgotten. Next: `queue.py`.
"""

from collections.abc import Iterator, Mapping
from math import floor

HALF_LIFE_S = 10.0
"""After so long, tokens that were computed for somebody count half."""

REMEMBER_S = 30.0
"""Who has neither waited nor run for so long is forgotten; until then it counts among those that share."""

SWEEP_S = 1.0
"""How often those to forget are looked for."""

OVER = 1.5
"""Who had so many times its equal part lately is over its share."""

Path = tuple[str, ...]


def path_of(tenant: Path) -> Path:
    """A path of its own for everybody: nobody is at once a leaf and above another."""
    return (*tenant, "")


class Tenant:
    """One node: somebody, or all below it. `tiers` counts what waits below it, by tier; `queues` is a leaf's own.

    `since` is when the oldest unbroken wait below it began, `served_at` when it last got a token computed.
    """

    __slots__ = ("_at", "_tokens", "children", "num_running", "num_waiting", "served_at", "since", "tiers")

    def __init__(self, at: float) -> None:
        self.children: dict[str, Tenant] = {}
        self.tiers: dict[int, int] = {}
        self.num_waiting = 0
        self.num_running = 0
        self.since = at
        self.served_at = at
        self._tokens = 0.0
        self._at = at

    def tokens(self, at: float) -> float:
        """What it got lately."""
        return float(self._tokens * 0.5 ** ((at - self._at) / HALF_LIFE_S))

    def serve(self, num_tokens: int, at: float) -> None:
        """It got some."""
        self._tokens = self.tokens(at) + num_tokens
        self._at = self.served_at = at

    def wait(self, tier: int, number: int, at: float) -> None:
        """So many more of that tier wait, or fewer."""
        if not self.num_waiting:
            self.since = at
        self.num_waiting += number
        self.tiers[tier] = self.tiers.get(tier, 0) + number
        if not self.tiers[tier]:
            del self.tiers[tier]

    def rank(self, at: float, aging_s: float) -> tuple[int, int, float, float]:
        """Smaller goes first: the better tier, then who runs less, had less, waits longer.

        A tier is better by one for each `aging_s` in which somebody waited and got nothing at all.
        """
        starved_s = at - max(self.since, self.served_at)
        return (min(self.tiers) - floor(starved_s / aging_s), self.num_running, self.tokens(at), self.since)

    def is_idle(self, at: float) -> bool:
        """Whether there is nothing to remember."""
        is_busy = self.children or self.num_waiting or self.num_running
        return not is_busy and at - self.served_at > REMEMBER_S


class Shares:
    """The tree."""

    def __init__(self, at: float = 0.0) -> None:
        self.root = Tenant(at)
        self._swept_at = at
        self._over: dict[Path, bool] = {}

    def nodes(self, path: Path, at: float) -> Iterator[Tenant]:
        """From the outermost level to the leaf; those that nobody knew are made."""
        node = self.root
        for name in path:
            if name not in node.children:
                node.children[name] = Tenant(at)
                self._over.clear()
            node = node.children[name]
            yield node

    def serve(self, path: Path, num_tokens: int, at: float) -> None:
        """So many tokens were computed for it."""
        self._over.clear()
        self.root.serve(num_tokens, at)
        for node in self.nodes(path, at):
            node.serve(num_tokens, at)
        if at - self._swept_at > SWEEP_S:
            self._swept_at = at
            _forget(self.root, at)

    def wait(self, path: Path, tier: int, number: int, at: float) -> None:
        """So many more wait, or fewer."""
        for node in self.nodes(path, at):
            node.wait(tier, number, at)

    def run(self, path: Path, number: int, at: float) -> None:
        """So many more run, or fewer."""
        for node in self.nodes(path, at):
            node.num_running += number

    def order(self, path: Path, at: float) -> tuple[float, ...]:
        """Sorts by what each level got lately, the outermost first."""
        return tuple(node.tokens(at) for node in self.nodes(path, at))

    def is_over(self, path: Path, at: float) -> bool:
        """Whether, at some level, it had lately more than `OVER` times an equal part of what its siblings had together.

        All of it fades alike, so that only another token, or another tenant, changes the answer.
        """
        if path not in self._over:
            self._over[path] = self._is_over(path, at)
        return self._over[path]

    def _is_over(self, path: Path, at: float) -> bool:
        parent = self.root
        for node in self.nodes(path, at):
            if node.tokens(at) * len(parent.children) > OVER * parent.tokens(at):
                return True
            parent = node
        return False


def most_waiting(waiting: Mapping[Path, int], newcomer: Path, number: int) -> Path:
    """Whose queue is the longest, level by level, if `number` of `newcomer` joined; among equals, the newcomer's.

    Who that is has to yield when a queue is full: the edge and the loop both ask this.
    """
    counts = {path: count for path, count in waiting.items() if path != newcomer}
    counts[newcomer] = waiting.get(newcomer, 0) + number
    found: Path = ()
    while True:
        level: dict[str, int] = {}
        for path, count in counts.items():
            if len(path) > len(found) and path[: len(found)] == found:
                level[path[len(found)]] = level.get(path[len(found)], 0) + count
        if not level:
            return found
        depth = len(found) + 1
        found = max(((*found, name) for name in level), key=lambda path: (level[path[-1]], path == newcomer[:depth]))


def _forget(node: Tenant, at: float) -> None:
    for name, child in list(node.children.items()):
        _forget(child, at)
        if child.is_idle(at):
            del node.children[name]
