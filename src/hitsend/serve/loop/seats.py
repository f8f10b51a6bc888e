"""Who sits where: slots given, left and kept, and prefixes brought to whoever can use them.

A sequence that ends leaves its cells where they are (*live*): the slot counts as free, and whoever goes on from them
takes it with them. When somebody else needs the slot, the cells are saved as bytes in host memory first, which costs
about a thousandth of computing them. A prompt that somebody is still computing is waited for (`leader`) and copied.

Enters: sequences that come, go and advance. Leaves: slots, filled as far as can be, and `WasMatched` reports. Always
true: kept cells never refuse or delay an admission, the pool's books say what every slot holds, a sequence that
gives up its place for others (preemption) gets what it had back where saving is cheaper than computing it again, and
without a cache all of this is `take` and `release`. Next: `entries.py`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.request import IDLE_TIER
from hitsend.serve.loop.costs import Costs
from hitsend.serve.loop.decoder import Decoder
from hitsend.serve.loop.entries import entry_left_by, entry_of_runner
from hitsend.serve.loop.kv import AccountingBroken, CellPool
from hitsend.serve.loop.messages import WasMatched
from hitsend.serve.loop.prefix_cache import Entry, Found, PrefixCache, Source
from hitsend.serve.loop.sequence import Sequence

if TYPE_CHECKING:
    from hitsend.serve.loop.roster import Share


class Seats:
    """The pool's slots and what lies in them. `cache` None: nothing is kept."""

    def __init__(self, decoder: Decoder, kv: CellPool, cache: PrefixCache | None, clock: Clock) -> None:
        self.kv = kv
        self.cache = cache
        self.costs = Costs()
        self._reports: list[WasMatched] = []
        self._decoder = decoder
        self._clock = clock
        self._live: dict[int, Entry] = {}
        self._parked: dict[int, NDArray[np.uint8]] = {}

    @property
    def num_saved_bytes(self) -> int:
        """Host memory that saved prefixes and parked sequences take."""
        return self.cache.num_bytes if self.cache is not None else 0

    @property
    def on_disk(self) -> tuple[int, str | None]:
        """Bytes of saved prefixes there, and why no more are written."""
        disk = self.cache.disk if self.cache is not None else None
        return (0, None) if disk is None or self.cache is None else (self.cache.num_disk_bytes, disk.problem)

    def take_reports(self) -> list[WasMatched]:
        """What was looked up since it was asked last."""
        reports, self._reports = self._reports, []
        return reports

    # Coming

    def take(self, sequence: Sequence, num_cells: int, at: float, running: Iterable[Sequence] = ()) -> int:
        """A slot for it, filled with what is there of its tokens; it still has to be admitted to it. See `follow`."""
        parked = self._parked.pop(sequence.arrival, None)
        if parked is not None:
            return self._unpark(sequence, num_cells, parked, at)
        found = self._find(sequence)
        if found.ahead is not None:
            sequence.leader = found.ahead.entry.owner
            return self._take_empty(num_cells, None, at)
        if found.ready is None:
            slot = self._take_empty(num_cells, None, at)
            self._tell(sequence, found, None, "", at)
            return slot
        source = found.ready
        if self._can_sit_down(source):
            return self._sit_down(sequence, source, num_cells, found, at)
        slot = self._take_empty(num_cells, source.entry, at)
        sequence.is_fetching = self._is_far(sequence, found, running)
        if not sequence.is_fetching:
            self._bring(sequence, slot, found, at)
        return slot

    def begin(self, sequence: Sequence, at: float) -> None:
        """It has its slot, and nobody to wait for: others may now wait for what it computes."""
        is_waiting = sequence.entry is not None or sequence.waits_for_other
        entry = None if is_waiting or self.cache is None else entry_of_runner(sequence, self.cache.rules, at)
        if entry is not None and self.cache is not None:
            sequence.entry, sequence.checkpoints = entry, entry.points
            self.cache.add(entry)

    def follow(self, running: Iterable[Sequence], at: float) -> None:
        """Who waited for another's prompt, or a file, gets it when it is there, or what there is if it won't come."""
        for sequence in running:
            is_settled = sequence.has_looked and sequence.leader is None and not sequence.is_fetching
            if is_settled or sequence.has_begun or sequence.is_paused or not self._may_use(sequence):
                continue
            found = self._find(sequence)
            sequence.leader = found.ahead.entry.owner if found.ahead is not None else None
            sequence.is_fetching = sequence.leader is None and self._is_far(sequence, found, running)
            if sequence.leader is None and not sequence.is_fetching:
                self._bring(sequence, sequence.held_slot, found, at)
                self.begin(sequence, at)

    # Going

    def leave(self, sequence: Sequence, at: float, *, is_kept: bool) -> int:
        """It gives its slot up; its cells stay there, where somebody may go on from them."""
        slot = sequence.held_slot
        self._forget_entry(sequence)
        sequence.leader, sequence.is_fetching = None, False
        kept = self._to_keep(sequence, at) if is_kept else None
        # behind its last token may lie what was guessed and is not wanted
        if kept is None or not self._decoder.truncate(slot, sequence.num_computed_tokens):
            self.kv.release(slot)
            self._decoder.release(slot)
            return slot
        self.kv.keep(slot)
        self._add_live(kept, slot)
        return slot

    def park(self, sequence: Sequence, at: float) -> int:
        """It is preempted: what it has is saved where that is cheaper than computing it again."""
        slot, count = sequence.held_slot, sequence.num_computed_tokens
        cache = self.cache
        if cache is not None and count and self.costs.is_saving_cheaper:
            saved = self._save(slot, count)
            if cache.make_room(saved.nbytes, at, worth=float("inf")):
                cache.num_bytes += saved.nbytes
                self._parked[sequence.arrival] = saved
                sequence.num_parked_tokens = count
        return self.leave(sequence, at, is_kept=False)

    def forget(self, sequence: Sequence) -> None:
        """It ended while it waited."""
        parked = self._parked.pop(sequence.arrival, None)
        if parked is not None and self.cache is not None:
            self.cache.num_bytes -= parked.nbytes

    # While they sit

    def hold_next(self, slot: int, at: float) -> bool:
        """A cell for its next token; kept cells make room for it."""
        if self.kv.needs_cell(slot):
            self._make_room(1, None, at)
        return self.kv.hold_next(slot)

    def advanced(self, sequence: Sequence, at: float) -> None:
        """Some of its tokens were computed: others may use them, and a checkpoint may be due."""
        entry = sequence.entry
        if entry is None or self.cache is None:
            return
        count = sequence.num_computed_tokens
        entry.num_ready = min(count, len(entry.tokens))
        if count in entry.points and sequence.cache_salt is not None:
            checkpoint = Entry(sequence.cache_salt, sequence.prompt_ids[:count], at=at, num_exact=count)
            if self.cache.covers(checkpoint.salt, checkpoint.tokens) is None:
                saved = self._save(sequence.held_slot, count)
                self._add_saved(checkpoint, saved, at)

    def stepped(self, shares: "list[Share]", seconds: float) -> None:
        """A step took so long; one of nothing but prompts tells what computing costs."""
        if not any(share.is_decode for share in shares):
            self.costs.computed(sum(share.num_tokens for share in shares), seconds)

    def vacate(self, slot: int, at: float) -> None:
        """Empty a free slot for somebody else; what it held is saved where there is room."""
        entry = self._live.get(slot)
        if entry is None or self.cache is None:
            return
        if entry.saved is None:
            self.cache.save(entry, self._save(slot, len(entry.tokens)), at)
        self._unlive(entry)
        self._decoder.release(slot)
        self.kv.drop_kept(slot)
        if not entry.has_copy:
            self.cache.remove(entry)

    def moved(self, sequence: Sequence) -> None:
        """It has another slot."""
        if sequence.entry is not None:
            sequence.entry.slot = sequence.slot

    def kept(self) -> dict[int, int]:
        """Slot → tokens that lie there for nobody."""
        return {slot: len(entry.tokens) for slot, entry in self._live.items()}

    def problems(self) -> list[str]:
        """What is wrong with the books."""
        return [] if self.cache is None else self.cache.problems(sum(each.nbytes for each in self._parked.values()))

    # Inside

    def _may_use(self, sequence: Sequence) -> bool:
        """Not whom a sibling computes for, nor those whose prompt is scored: they need all of its logits."""
        is_on = self.cache is not None and sequence.cache_salt is not None
        return is_on and not (sequence.is_scoring or sequence.waits_for_sibling)

    def _find(self, sequence: Sequence) -> Found:
        if self.cache is None or sequence.cache_salt is None or not self._may_use(sequence):
            return Found(0)
        found = self.cache.find(sequence.cache_salt, sequence.known_ids)
        ahead = found.ahead.entry.owner if found.ahead is not None else None
        is_slow = ahead is not None and ahead.tier >= IDLE_TIER > sequence.tier  # idle work makes way, its prompts too
        if ahead is not None and (ahead is sequence or ahead.waits_for_other or ahead.is_paused or is_slow):
            found = found._replace(ahead=None)
        return found

    def _is_far(self, sequence: Sequence, found: Found, running: Iterable[Sequence]) -> bool:
        """Whether a file is read for it first: where others go on, who would wait for it, too."""
        others = (each for each in running if each is not sequence and each.slot is not None and not each.is_paused)
        return not (all(each.waits_for_other for each in others) or self.cache is None or self.cache.at_hand(found))

    def _can_sit_down(self, source: Source) -> bool:
        """Whether it takes the slot itself: little would be lost, or there is no other one to copy into."""
        entry = source.entry
        if entry.slot is None or entry.owner is not None or self.cache is None:
            return False
        lost = len(entry.tokens) - source.num_tokens
        return lost < self.cache.rules.step or self.kv.num_free_slots == 1

    def _sit_down(self, sequence: Sequence, source: Source, num_cells: int, found: Found, at: float) -> int:
        entry, cache = source.entry, self.cache
        assert cache is not None
        assert entry.slot is not None
        slot = entry.slot
        if len(entry.tokens) - source.num_tokens >= cache.rules.step and entry.saved is None:
            cache.save(entry, self._save(slot, len(entry.tokens)), at)
        self._unlive(entry)
        self.kv.drop_kept(slot)
        self._make_room(num_cells, None, at)
        self.kv.take(num_cells, slot)
        if source.num_tokens < len(entry.tokens) and not self._decoder.truncate(slot, source.num_tokens):
            raise AccountingBroken(f"slot {slot} can't go back to {source.num_tokens} tokens")
        cache.use(entry, at)
        sequence.num_reuses = entry.hits
        if not entry.has_copy:
            cache.remove(entry)
        self._filled(sequence, slot, source.num_tokens)
        self._tell(sequence, found, source, "live", at)
        return slot

    def _bring(self, sequence: Sequence, slot: int, found: Found, at: float) -> None:
        """Copy what is ready into its empty slot."""
        source, cache = found.ready, self.cache
        if source is None or cache is None or not self._is_room_for(source.entry, at):
            self._tell(sequence, found, None, "", at)
            return
        entry, kind = source.entry, source.entry.place
        if entry.slot is not None and self.kv.is_shared:
            self._decoder.copy(entry.slot, slot)
        else:
            saved = self._bytes_of(entry, at)
            if saved is None:  # its file is lost, and with it the entry: what else is there?
                self._bring(sequence, slot, self._find(sequence), at)
                return
            self._decoder.restore(slot, saved)
        if source.num_tokens < len(entry.tokens) or entry.owner is not None:
            self._decoder.truncate(slot, source.num_tokens)
        cache.use(entry, at)
        self._filled(sequence, slot, source.num_tokens)
        self._tell(sequence, found, source, kind, at)

    def _is_room_for(self, entry: Entry, at: float) -> bool:
        """Whether it is still there and can be brought: saved bytes come whole, however few of them are of use."""
        kv, lacking = self.kv, 0 if entry.slot is not None else len(entry.tokens) - self.kv.num_unfilled_cells
        if 0 < lacking <= kv.num_kept_cells:
            self._make_room(kv.num_empty_cells + lacking, None, at)
        is_room = entry.slot is not None or kv.num_unfilled_cells >= len(entry.tokens)
        return is_room and self.cache is not None and entry in self.cache

    def _bytes_of(self, entry: Entry, at: float) -> NDArray[np.uint8] | None:
        """As they are in memory, or will be if there is room: the next one finds them ready. None: lost."""
        assert self.cache is not None
        if entry.saved is not None:
            return entry.saved
        saved = self.cache.load(entry) if entry.slot is None else self._save(entry.slot, entry.num_ready)
        if saved is not None and entry.owner is None:
            self.cache.save(entry, saved, at)
        return saved

    def _unpark(self, sequence: Sequence, num_cells: int, parked: NDArray[np.uint8], at: float) -> int:
        assert self.cache is not None
        self.cache.num_bytes -= parked.nbytes
        slot = self._take_empty(num_cells, None, at)
        self._decoder.restore(slot, parked)
        self._filled(sequence, slot, sequence.num_parked_tokens)
        return slot

    def _filled(self, sequence: Sequence, slot: int, num_tokens: int) -> None:
        self.kv.fill(slot, num_tokens)
        sequence.num_computed_tokens = num_tokens

    def _tell(self, sequence: Sequence, found: Found, source: Source | None, kind: str, at: float) -> None:
        """Once per sequence: what a preempted one finds again is nobody's saving, whoever computed it for it."""
        if sequence.has_looked or not self._may_use(sequence):
            return
        sequence.has_looked = True
        if sequence.num_output_tokens or sequence.num_prompt_tokens_computed:
            return
        count = source.num_tokens if source is not None else 0
        sequence.num_cached_tokens = min(count, sequence.num_prompt_tokens)
        assert self.cache is not None
        limit = self.cache.rules.limit_of(found.num_matched, count, sequence.num_prompt_tokens)
        where = found.difference or (None, None, None)
        matched = (found.num_matched, count, kind, limit)
        self._reports.append(WasMatched(sequence.request_id, sequence.choice, at, *matched, *where))

    def _take_empty(self, num_cells: int, source: Entry | None, at: float) -> int:
        if self.cache is None:
            return self.kv.take(num_cells)
        slot = self._choose(source, at)
        self.vacate(slot, at)
        self._make_room(num_cells, source, at)
        return self.kv.take(num_cells, slot)

    def _choose(self, source: Entry | None, at: float) -> int:
        """Next to those that run, empty before kept, worth little before worth much; not where the source lies."""
        held = self.kv.held_slots()
        low, high = (min(held), max(held)) if held else (0, self.kv.num_slots)

        def order(slot: int) -> tuple[bool, int, float, int]:
            entry = self._live.get(slot)
            outside = max(low - slot, slot - high, 0) if not self.kv.is_shared else 0
            is_source = entry is not None and entry is source
            return (is_source, outside, entry.value(at) if entry is not None else -1.0, slot)

        return min(self.kv.free_slots(), key=order)

    def _make_room(self, num_cells: int, but: Entry | None, at: float) -> None:
        """Kept cells go, the least valuable first, until so many are really empty (one pool of cells only)."""
        while self._live and self.kv.num_empty_cells < num_cells:
            others = [entry for entry in self._live.values() if entry is not but] or list(self._live.values())
            victim = min(others, key=lambda each: each.value(at))
            assert victim.slot is not None
            self.vacate(victim.slot, at)

    def _to_keep(self, sequence: Sequence, at: float) -> Entry | None:
        """What its cells are worth keeping as."""
        entry = None if self.cache is None else entry_left_by(sequence, self.cache.rules, at)
        if entry is None or self.cache is None:
            return None
        other = self.cache.covers(entry.salt, entry.tokens)
        if other is not None:
            self.cache.use(other, at)
        return entry if other is None else None

    def _add_live(self, entry: Entry, slot: int) -> None:
        assert self.cache is not None
        entry.slot = slot
        self._live[slot] = entry
        self.cache.add(entry)
        self._drop_covered(entry)

    def _add_saved(self, entry: Entry, saved: NDArray[np.uint8], at: float) -> None:
        assert self.cache is not None
        if self.cache.make_room(saved.nbytes, at, worth=entry.value(at)):
            entry.saved = saved
            self.cache.add(entry)
        elif self.cache.store(entry, saved, at):
            self.cache.add(entry)

    def _drop_covered(self, entry: Entry) -> None:
        assert self.cache is not None
        for other in self.cache.covered_by(entry):
            entry.hits = max(entry.hits, other.hits)
            if other.slot is not None:
                slot = other.slot
                self._unlive(other)
                self._decoder.release(slot)
                self.kv.drop_kept(slot)
            self.cache.remove(other)

    def _unlive(self, entry: Entry) -> None:
        assert entry.slot is not None
        del self._live[entry.slot]
        entry.slot = None

    def _forget_entry(self, sequence: Sequence) -> None:
        if sequence.entry is not None and self.cache is not None:
            self.cache.remove(sequence.entry)
            sequence.entry = None
            sequence.checkpoints = ()

    def _save(self, slot: int, num_tokens: int) -> NDArray[np.uint8]:
        begin = self._clock.now()
        saved = self._decoder.save(slot)
        self.costs.saved(num_tokens, saved.nbytes, self._clock.now() - begin)
        return saved
