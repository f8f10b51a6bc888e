"""What of earlier prompts can be used again: a radix tree over token ids, one per salt.

An entry is a run of tokens whose cache still exists: in a slot (of somebody who still runs, or left by one who ended),
as saved bytes in host memory, or on disk, or in several of them. What has to leave memory goes to disk, where there is
one. A model that can go back gives any prefix of an entry; one with recurrent
layers gives an entry whole or not at all, so its entries are checkpoints.

Enters: runs of tokens and where their cache is. Leaves: the best match of a prompt, and who has to go. Always true:
nothing is found under another salt; saved and parked bytes never exceed their bound, nor do those on disk; what has the
least value (tokens times uses, halved every `HALF_LIFE_S`) goes first, and nothing goes for something worth less.
Next: `radix.py`, `seats.py`, which moves the cells.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.serve.loop.disk import Disk, Stored
from hitsend.serve.loop.radix import Difference, Ids, Node, insert, take_out, walk

if TYPE_CHECKING:
    from hitsend.serve.loop.decoder import Decoder
    from hitsend.serve.loop.roster import LoopLimits
    from hitsend.serve.loop.sequence import Sequence as Running

HALF_LIFE_S = 600.0
"""What wasn't used for so long is worth half."""


class Entry:
    """One run of tokens. `num_ready` of them are computed, `num_exact` in the pieces in which anybody would compute
    them.

    `owner` is who runs in `slot`; without one the slot is free and only kept. `points`: where its owner will leave
    checkpoints (models that can't go back).
    """

    __slots__ = (
        "hits",
        "num_exact",
        "num_ready",
        "owner",
        "points",
        "salt",
        "saved",
        "slot",
        "stored",
        "tokens",
        "used_at",
    )

    def __init__(self, salt: str, tokens: Ids, *, at: float, num_exact: int) -> None:
        self.salt = salt
        self.tokens = tokens
        self.num_ready = len(tokens)
        self.num_exact = num_exact
        self.slot: int | None = None
        self.saved: NDArray[np.uint8] | None = None
        self.stored: Stored | None = None
        self.owner: Running | None = None
        self.points: tuple[int, ...] = ()
        self.hits = 0
        self.used_at = at

    @property
    def is_near(self) -> bool:
        """Whether no file has to be read for it."""
        return self.slot is not None or self.saved is not None

    @property
    def has_copy(self) -> bool:
        """Whether it outlives its slot."""
        return self.saved is not None or self.stored is not None

    @property
    def place(self) -> str:
        """Where it is had from, for the record."""
        if self.slot is not None:
            return "live" if self.owner is None else "sibling"
        return "saved" if self.saved is not None else "disk"

    def value(self, at: float) -> float:
        """Tokens times uses, fading."""
        return float(len(self.tokens) * (1 + self.hits) * 0.5 ** ((at - self.used_at) / HALF_LIFE_S))


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
    """`max_bytes` of saved cache in memory, `max_disk_bytes` on disk. Prompts go on at multiples of `step`. `is_whole`:
    entries can't be cut.

    Without `takes_inexact` only what was computed in the usual pieces counts, so that outputs keep their last bits.
    """

    max_bytes: int
    step: int
    is_whole: bool
    takes_inexact: bool
    max_disk_bytes: int = 0

    def limit_of(self, num_matched: int, num_used: int, num_prompt_tokens: int) -> str:
        """Why no more of what is known was used, as `PrefixMatched.limited_by` has it; empty: all of it was."""
        if num_used >= num_matched:
            return ""
        if self.is_whole:
            return "checkpoint"
        most = min(num_matched, num_prompt_tokens - 1) // self.step * self.step
        return "step" if num_used >= most else "place"


class PrefixCache:
    """The trees, and the books over their bytes. Whoever calls moves the cells."""

    def __init__(self, rules: CacheRules, disk: Disk | None = None) -> None:
        self.rules = rules
        self.disk = disk
        self.num_bytes = 0
        self.num_disk_bytes = 0
        self._roots: dict[str, Node[Entry]] = {}
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
        path, num_matched, difference = walk(root, tokens)
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
        """A kept entry that can stand in for this run; not one for which a file has to be read."""
        root = self._roots.get(salt)
        if root is None:
            return None
        path, num_matched, _ = walk(root, tokens)
        if num_matched < len(tokens):
            return None
        for entry in path[-1][0].entries.values():
            is_same = not self.rules.is_whole or len(entry.tokens) == len(tokens)
            if entry.owner is None and entry.is_near and is_same:
                return entry
        return None

    def add(self, entry: Entry) -> None:
        """Put it into its tree. Kept entries that it stands in for are the caller's to drop (`covered_by`)."""
        self._entries[id(entry)] = entry
        self.num_bytes += entry.saved.nbytes if entry.saved is not None else 0
        insert(self._roots.setdefault(entry.salt, Node()), entry.tokens, entry)

    def covered_by(self, entry: Entry) -> list[Entry]:
        """Kept entries that are of no use beside this one: beginnings of it, or the same."""
        path, _, _ = walk(self._roots[entry.salt], entry.tokens)
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
        self._unstore(entry)
        root = self._roots[entry.salt]
        take_out(root, entry.tokens, entry)
        if not root.entries:
            del self._roots[entry.salt]

    def save(self, entry: Entry, saved: NDArray[np.uint8], at: float) -> bool:
        """Keep its bytes where there is room, or less valuable things make some: in memory, else on disk."""
        if entry.saved is None and self.make_room(saved.nbytes, at, worth=entry.value(at)):
            entry.saved = saved
            self.num_bytes += saved.nbytes
        return entry.saved is not None or self.store(entry, saved, at)

    def unsave(self, entry: Entry) -> None:
        """Drop its bytes in memory."""
        if entry.saved is not None:
            self.num_bytes -= entry.saved.nbytes
            entry.saved = None

    def store(self, entry: Entry, saved: NDArray[np.uint8], at: float) -> bool:
        """Have its bytes on disk, if there is one that takes them."""
        size, disk = saved.nbytes, self.disk
        if entry.stored is not None:
            return True
        if disk is None or not disk.takes(size) or not self._make_disk_room(size, at, worth=entry.value(at)):
            return False
        entry.stored = Stored(disk.put(entry.salt, entry.tokens, saved), size)
        self.num_disk_bytes += size
        return True

    def at_hand(self, found: Found) -> bool:
        """Whether what is ready needs no file for long. One for which it would is read meanwhile: ask again."""
        stored = None if found.ready is None or found.ready.entry.is_near else found.ready.entry.stored
        return stored is None or self.disk is None or self.disk.fetch(stored.number)

    def load(self, entry: Entry) -> NDArray[np.uint8] | None:
        """Its bytes from disk; what can't be had is forgotten."""
        if self.disk is None or entry.stored is None:
            return None
        saved = self.disk.get(entry.stored.number, entry.salt, entry.tokens)
        if saved is None and entry.is_near:
            self._unstore(entry)
        elif saved is None:
            self.remove(entry)
        return saved

    def make_room(self, num_bytes: int, at: float, *, worth: float) -> bool:
        """Whether so many bytes fit now; entries worth less than `worth` go for them, if that is enough."""
        lacking = self.num_bytes + num_bytes - self.rules.max_bytes
        victims = self._victims(lacking, at, worth, lambda entry: 0 if entry.saved is None else entry.saved.nbytes)
        for entry in victims or ():
            saved = entry.saved
            self.unsave(entry)
            if entry.slot is None and (saved is None or not self.store(entry, saved, at)):
                self.remove(entry)
        return victims is not None

    def _make_disk_room(self, num_bytes: int, at: float, *, worth: float) -> bool:
        lacking = self.num_disk_bytes + num_bytes - self.rules.max_disk_bytes
        victims = self._victims(lacking, at, worth, lambda entry: 0 if entry.stored is None else entry.stored.num_bytes)
        for entry in victims or ():
            self._unstore(entry)
            if not entry.is_near:
                self.remove(entry)
        return victims is not None

    def _victims(self, lacking: int, at: float, worth: float, size_of: Callable[[Entry], int]) -> list[Entry] | None:
        """The least valuable ones that are worth less and give so many bytes; None where all of them don't."""
        if lacking <= 0:
            return []
        victims: list[Entry] = []
        poorer = [entry for entry in self if size_of(entry) and entry.value(at) < worth]
        for entry in sorted(poorer, key=lambda each: each.value(at)):
            victims.append(entry)
            lacking -= size_of(entry)
            if lacking <= 0:
                return victims
        return None

    def _unstore(self, entry: Entry) -> None:
        if entry.stored is not None and self.disk is not None:
            self.disk.drop(entry.stored.number)
            self.num_disk_bytes -= entry.stored.num_bytes
            entry.stored = None

    def use(self, entry: Entry, at: float) -> None:
        """Somebody took some of it."""
        entry.hits += 1
        entry.used_at = at

    def problems(self, parked: int = 0) -> list[str]:
        """What is wrong with the books: nothing, or one sentence each. `parked`: counted bytes that aren't its own."""
        found = []
        held = sum(entry.saved.nbytes for entry in self if entry.saved is not None)
        if held + parked != self.num_bytes or self.num_bytes > max(held, self.rules.max_bytes):
            limit = self.rules.max_bytes
            found.append(f"{held} bytes saved and {parked} parked, {self.num_bytes} counted, limit {limit}")
        stored = sum(entry.stored.num_bytes for entry in self if entry.stored is not None)
        if stored != self.num_disk_bytes or stored > self.rules.max_disk_bytes:
            found.append(f"{stored} bytes on disk, {self.num_disk_bytes} counted, limit {self.rules.max_disk_bytes}")
        if lost := sum(not entry.is_near and entry.stored is None for entry in self):
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


def cache_for(decoder: "Decoder", limits: "LoopLimits", disk: Disk | None) -> PrefixCache | None:
    """As the settings want it."""
    if not limits.prefix_cache_bytes:
        return None
    rules = CacheRules(
        max_bytes=limits.prefix_cache_bytes,
        step=limits.prefix_step,
        is_whole=not decoder.can_go_back,
        takes_inexact=limits.prefix_answers,
        max_disk_bytes=limits.prefix_disk_bytes,
    )
    return PrefixCache(rules, disk)


def ids(tokens: Sequence[int]) -> Ids:
    """As the tree takes them."""
    return np.array(tokens, dtype=np.int32)


def _rank(entry: Entry, num_tokens: int) -> tuple[int, bool, bool, int, int]:
    """More tokens first, then what costs no reading, no copy, then the shorter one, which is copied sooner."""
    is_live = entry.slot is not None and entry.owner is None
    return (num_tokens, entry.is_near, is_live, -len(entry.tokens), entry.hits)
