"""What of earlier prompts can be used again: a radix tree over token ids, one per salt.

An entry is a run of tokens whose cache still exists: in a slot (of somebody who still runs, or left by one who ended)
or as saved bytes in host memory, or both. A model that can go back gives any prefix of an entry; one with recurrent
layers gives an entry whole or not at all, so its entries are checkpoints.

Enters: runs of tokens and where their cache is. Leaves: the best match of a prompt, and who has to go. Always true:
nothing is found under another salt; saved and parked bytes never exceed their bound; what has the least value (tokens
times uses, halved every `HALF_LIFE_S`) goes first, and nothing goes for something worth less. Next: `seats.py`, which
moves the cells.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hitsend.serve.loop.decoder import Decoder
    from hitsend.serve.loop.roster import LoopLimits
    from hitsend.serve.loop.sequence import Sequence as Running

HALF_LIFE_S = 600.0
"""What wasn't used for so long is worth half."""

Ids = NDArray[np.int32]


class Entry:
    """One run of tokens. `num_ready` of them are computed, `num_exact` in the pieces in which anybody would compute
    them.

    `owner` is who runs in `slot`; without one the slot is free and only kept. `points`: where its owner will leave
    checkpoints (models that can't go back).
    """

    __slots__ = ("hits", "num_exact", "num_ready", "owner", "points", "salt", "saved", "slot", "tokens", "used_at")

    def __init__(self, salt: str, tokens: Ids, *, at: float, num_exact: int) -> None:
        self.salt = salt
        self.tokens = tokens
        self.num_ready = len(tokens)
        self.num_exact = num_exact
        self.slot: int | None = None
        self.saved: NDArray[np.uint8] | None = None
        self.owner: Running | None = None
        self.points: tuple[int, ...] = ()
        self.hits = 0
        self.used_at = at

    def value(self, at: float) -> float:
        """Tokens times uses, fading."""
        return float(len(self.tokens) * (1 + self.hits) * 0.5 ** ((at - self.used_at) / HALF_LIFE_S))


class Difference(NamedTuple):
    """Where a prompt leaves what is known: the token that was there before, and the prompt's own."""

    position: int
    known_token_id: int
    token_id: int


class Source(NamedTuple):
    """An entry, and how many tokens of it are of use."""

    entry: Entry
    num_tokens: int


class Found(NamedTuple):
    """`num_matched` tokens are known; `ready` can be used now, `ahead` is being computed and will be of more use."""

    num_matched: int
    ready: Source | None = None
    ahead: Source | None = None
    difference: Difference | None = None


class CacheRules(msgspec.Struct, frozen=True):
    """`max_bytes` of saved cache. Prompts go on at multiples of `step`. `is_whole`: entries can't be cut.

    Without `takes_inexact` only what was computed in the usual pieces counts, so that outputs keep their last bits.
    """

    max_bytes: int
    step: int
    is_whole: bool
    takes_inexact: bool


class _Node:
    """An edge's tokens, what goes on from its end, and all entries that pass through or end here."""

    __slots__ = ("children", "entries", "parent", "tokens")

    def __init__(self, tokens: Ids, parent: "_Node | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.entries: dict[int, Entry] = {}


class PrefixCache:
    """The trees, and the books over their bytes. Whoever calls moves the cells."""

    def __init__(self, rules: CacheRules) -> None:
        self.rules = rules
        self.num_bytes = 0
        self._roots: dict[str, _Node] = {}
        self._entries: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __contains__(self, entry: Entry) -> bool:
        return id(entry) in self._entries

    def find(self, salt: str, tokens: Ids) -> Found:
        """The best match of a prompt, of which at least the last token stays to be computed."""
        root = self._roots.get(salt)
        if root is None:
            return Found(0)
        path, num_matched, difference = _walk(root, tokens)
        ready: Source | None = None
        ahead: Source | None = None
        seen: set[int] = set()
        for node, depth in reversed(path):
            if ready is not None and ready.num_tokens >= depth:
                break  # what is higher up shares less
            for key, entry in node.entries.items():
                if key in seen:
                    continue
                seen.add(key)
                now = self._usable(entry, depth, len(tokens) - 1)
                if now and (ready is None or _rank(entry, now) > _rank(ready.entry, ready.num_tokens)):
                    ready = Source(entry, now)
                later = self._will_be_usable(entry, depth, len(tokens) - 1)
                if later and (ahead is None or later > ahead.num_tokens):
                    ahead = Source(entry, later)
        if ahead is not None and ready is not None and ahead.num_tokens <= ready.num_tokens:
            ahead = None
        return Found(num_matched, ready, ahead, difference)

    def covers(self, salt: str, tokens: Ids) -> Entry | None:
        """A kept entry that can stand in for this run."""
        root = self._roots.get(salt)
        if root is None:
            return None
        path, num_matched, _ = _walk(root, tokens)
        if num_matched < len(tokens):
            return None
        for entry in path[-1][0].entries.values():
            if entry.owner is None and (not self.rules.is_whole or len(entry.tokens) == len(tokens)):
                return entry
        return None

    def add(self, entry: Entry) -> None:
        """Put it into its tree. Kept entries that it stands in for are the caller's to drop (`covered_by`)."""
        self._entries[id(entry)] = entry
        self.num_bytes += entry.saved.nbytes if entry.saved is not None else 0
        nothing = np.empty(0, np.int32)
        node, at = self._roots.setdefault(entry.salt, _Node(nothing, None)), 0
        node.entries[id(entry)] = entry
        while at < len(entry.tokens):
            child = node.children.get(int(entry.tokens[at]))
            if child is None:
                child = _Node(entry.tokens[at:], node)
                node.children[int(entry.tokens[at])] = child
            elif (common := _common(child.tokens, entry.tokens[at:])) < len(child.tokens):
                child = _split(child, common)
            child.entries[id(entry)] = entry
            node, at = child, at + len(child.tokens)

    def covered_by(self, entry: Entry) -> list[Entry]:
        """Kept entries that are of no use beside this one: beginnings of it, or the same."""
        path, _, _ = _walk(self._roots[entry.salt], entry.tokens)
        found = {key: each for node, _ in path for key, each in node.entries.items()}
        size, is_whole = len(entry.tokens), self.rules.is_whole
        return [
            each
            for each in found.values()
            if each is not entry
            and each.owner is None
            and (len(each.tokens) == size if is_whole else len(each.tokens) <= size)
            and np.array_equal(each.tokens, entry.tokens[: len(each.tokens)])
        ]

    def remove(self, entry: Entry) -> None:
        """Forget it."""
        del self._entries[id(entry)]
        self.unsave(entry)
        node, at = self._roots[entry.salt], 0
        last = node
        while True:
            del node.entries[id(entry)]
            last = node
            if at >= len(entry.tokens):
                break
            node = node.children[int(entry.tokens[at])]
            at += len(node.tokens)
        self._tidy(entry.salt, last)

    def save(self, entry: Entry, saved: NDArray[np.uint8], at: float) -> bool:
        """Keep its bytes where there is room, or less valuable things make some."""
        if entry.saved is not None or not self.make_room(saved.nbytes, at, worth=entry.value(at)):
            return entry.saved is not None
        entry.saved = saved
        self.num_bytes += saved.nbytes
        return True

    def unsave(self, entry: Entry) -> None:
        """Drop its bytes."""
        if entry.saved is not None:
            self.num_bytes -= entry.saved.nbytes
            entry.saved = None

    def make_room(self, num_bytes: int, at: float, *, worth: float) -> bool:
        """Whether so many bytes fit now; entries worth less than `worth` go for them, if that is enough."""
        lacking = self.num_bytes + num_bytes - self.rules.max_bytes
        victims: list[Entry] = []
        saved = [entry for entry in self if entry.saved is not None and entry.value(at) < worth]
        for entry in sorted(saved, key=lambda each: each.value(at)) if lacking > 0 else ():
            victims.append(entry)
            lacking -= entry.saved.nbytes if entry.saved is not None else 0
            if lacking <= 0:
                break
        if lacking > 0:
            return False
        for entry in victims:
            if entry.slot is None:
                self.remove(entry)
            else:
                self.unsave(entry)
        return True

    def use(self, entry: Entry, at: float) -> None:
        """Somebody took some of it."""
        entry.hits += 1
        entry.used_at = at

    def problems(self) -> list[str]:
        """What is wrong with the books: nothing, or one sentence each."""
        found = []
        held = sum(entry.saved.nbytes for entry in self if entry.saved is not None)
        if not held <= self.num_bytes <= max(held, self.rules.max_bytes):
            found.append(f"{held} bytes saved, {self.num_bytes} counted, limit {self.rules.max_bytes}")
        if lost := sum(entry.slot is None and entry.saved is None for entry in self):
            found.append(f"{lost} cached prefixes are nowhere")
        return found

    def _usable(self, entry: Entry, depth: int, most: int) -> int:
        if self.rules.is_whole:
            whole = len(entry.tokens)
            is_there = entry.owner is None and whole <= min(depth, most)
            return whole if is_there and (self.rules.takes_inexact or whole <= entry.num_exact) else 0
        count = min(depth, most, entry.num_ready)
        count = count if self.rules.takes_inexact else min(count, entry.num_exact)
        return count // self.rules.step * self.rules.step

    def _will_be_usable(self, entry: Entry, depth: int, most: int) -> int:
        """When its owner has computed its prompt."""
        if entry.owner is None or entry.num_ready >= len(entry.tokens):
            return 0
        if self.rules.is_whole:
            left = [point for point in entry.points if entry.num_ready < point <= min(depth, most)]
            return max(left, default=0)
        return min(depth, most, entry.num_exact or len(entry.tokens)) // self.rules.step * self.rules.step

    def _tidy(self, salt: str, node: _Node) -> None:
        """No node without entries, no split where nothing parts any more."""
        while not node.entries:
            if node.parent is None:
                del self._roots[salt]
                return
            del node.parent.children[int(node.tokens[0])]
            node = node.parent
        if node.parent is not None and len(node.children) == 1:
            (child,) = node.children.values()
            if len(child.entries) == len(node.entries):
                child.tokens = np.concatenate([node.tokens, child.tokens])
                child.parent = node.parent
                node.parent.children[int(child.tokens[0])] = child


def cache_for(decoder: "Decoder", limits: "LoopLimits") -> PrefixCache | None:
    """As the settings want it."""
    if not limits.prefix_cache_bytes:
        return None
    rules = CacheRules(
        max_bytes=limits.prefix_cache_bytes,
        step=limits.prefix_step,
        is_whole=not decoder.can_go_back,
        takes_inexact=limits.prefix_answers,
    )
    return PrefixCache(rules)


def ids(tokens: Sequence[int]) -> Ids:
    """As the tree takes them."""
    return np.array(tokens, dtype=np.int32)


def _rank(entry: Entry, num_tokens: int) -> tuple[int, bool, int, int]:
    """More tokens first, then what costs no copy, then the shorter one, which is copied sooner."""
    return (num_tokens, entry.slot is not None and entry.owner is None, -len(entry.tokens), entry.hits)


def _common(one: Ids, other: Ids) -> int:
    size = min(len(one), len(other))
    places = np.flatnonzero(one[:size] != other[:size])
    return int(places[0]) if places.size else size


def _walk(root: _Node, tokens: Ids) -> tuple[list[tuple[_Node, int]], int, Difference | None]:
    """The nodes on the way and how much of the tokens each of them shares; that of the last one; what parts them."""
    path, node, at = [(root, 0)], root, 0
    while at < len(tokens):
        child = node.children.get(int(tokens[at]))
        if child is None:
            break
        common = _common(child.tokens, tokens[at:])
        at += common
        node = child
        path.append((node, at))
        if common < len(child.tokens):
            is_end = at == len(tokens)
            return path, at, None if is_end else Difference(at, int(child.tokens[common]), int(tokens[at]))
    if at < len(tokens) and node.children:
        return path, at, Difference(at, next(iter(node.children)), int(tokens[at]))
    return path, at, None


def _split(node: _Node, at: int) -> _Node:
    """A new node for its first tokens, above it."""
    assert node.parent is not None
    upper = _Node(node.tokens[:at], node.parent)
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens = node.tokens[at:]
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    upper.entries = dict(node.entries)
    return upper
