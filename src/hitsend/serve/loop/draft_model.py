"""Drafts from a second, smaller model with the same vocabulary.

It has a cache of its own, with as many slots. Each draft is what it would say itself if it always took the likeliest
token: no random choice, so the exact rule of `verify.py` holds. A sequence's cache here is brought up to date when a
draft is wanted: what was guessed wrong is forgotten, what was sampled since is computed together with the first guess.
Whoever is far behind (a prompt, or a while without drafts) spends its turn on catching up, one chunk per step.

Enters: sequences. Leaves: guesses. Always true: a slot here belongs to one running sequence and is emptied when that
one has ended or lost its place; a failure of the second model costs drafts, nothing else. Next: `verify.py`.
"""

import numpy as np

from hitsend.core.clock import Clock
from hitsend.core.drafts import Drafted
from hitsend.serve.loop.decoder import Batch, Decoder, DecoderFailed
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.speculate import StepCosts
from hitsend.serve.loop.trust import Trusts

CATCH_UP = 256
"""Most tokens that are computed for those behind in one step, and most that one may be behind and still get a draft."""


class _Mirror:
    """One sequence's cache in the second model: so many known tokens, then guesses."""

    __slots__ = ("guesses", "num_known", "sequence", "slot")

    def __init__(self, sequence: Sequence, slot: int) -> None:
        self.sequence = sequence
        self.slot = slot
        self.num_known = 0
        self.guesses: list[int] = []


class DraftModel:
    """See `verify.Proposer`. `decoder` is the second model, with as many slots and cells as the first.

    `pass_s`: what it takes for one token, until its own passes say it better.
    """

    def __init__(self, decoder: Decoder, clock: Clock, pass_s: float) -> None:
        self._decoder = decoder
        self._clock = clock
        self._costs = StepCosts()
        self._costs.observe(1, 1, pass_s)
        self._trusts = Trusts(is_shared=True)
        self._mirrors: dict[int, _Mirror] = {}
        self._free = list(range(decoder.num_slots))

    def name_for(self, sequence: Sequence) -> str:  # noqa: ARG002  # the protocol's
        """The one name it has."""
        return "draft"

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """As far as its last guesses for each were right."""
        self._sweep()
        return self._trusts.chances(sequences)

    def longest(self, sequences: list[Sequence]) -> int:
        """One token, until one was right."""
        return self._trusts.longest(sequences)

    def propose(self, sequences: list[Sequence], length: int) -> list[tuple[int, ...]]:
        """What it would say, for those that are up to date or nearly."""
        mirrors = [mirror for sequence in sequences if (mirror := self._mirror_of(sequence)) is not None]
        try:
            drafts = self._propose(mirrors, length)
        except DecoderFailed:
            for arrival in list(self._mirrors):  # all: what is left of whose wrong guesses is not known
                self._forget(arrival)
            drafts = {}
        return [drafts.get(sequence.arrival, ()) for sequence in sequences]

    def seconds(self, count: int, length: int) -> float:
        """So many passes of one token each."""
        return self._costs.seconds(length, count * length)

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """What became of a draft."""
        self._trusts.learn(sequence, drafted)

    def _propose(self, mirrors: list[_Mirror], length: int) -> dict[int, tuple[int, ...]]:
        for mirror in self._mirrors.values():  # of those without a turn, too: all share the cells
            self._agree(mirror)
        room = min(CATCH_UP, self._decoder.max_batch_tokens)
        ready: list[tuple[_Mirror, list[int]]] = []
        for mirror in sorted(mirrors, key=lambda each: each.sequence.num_pending_tokens):
            missing = mirror.sequence.token_ids[mirror.num_known :]
            if len(missing) <= room:
                ready.append((mirror, missing))
                room -= len(missing)
            elif room > 1:
                # all but the last one, which the first guess needs
                self._feed([(mirror, missing[: min(room, len(missing) - 1)])])
                room = 0
        drafts: dict[int, tuple[int, ...]] = {}
        fed = sorted(ready, key=lambda each: each[0].slot)
        for _ in range(length if fed else 0):
            guesses = self._feed(fed)
            for (mirror, _), guess in zip(fed, guesses, strict=True):
                drafts[mirror.sequence.arrival] = (*drafts.get(mirror.sequence.arrival, ()), guess)
            fed = [(mirror, [guess]) for (mirror, _), guess in zip(fed, guesses, strict=True)]
        return drafts

    def _agree(self, mirror: _Mirror) -> None:
        """Keep the guesses that came true, forget the others."""
        known = mirror.sequence.token_ids
        num_cached = mirror.num_known + len(mirror.guesses)
        for guess in mirror.guesses:
            if mirror.num_known >= len(known) - 1 or known[mirror.num_known] != guess:
                break
            mirror.num_known += 1
        mirror.guesses = []
        if num_cached > mirror.num_known and not self._decoder.truncate(mirror.slot, mirror.num_known):
            raise DecoderFailed("the draft model can't forget tokens", is_fatal=False)

    def _feed(self, fed: list[tuple[_Mirror, list[int]]]) -> list[int]:
        """Compute the tokens; returns what each would say next. `fed` is sorted by slot."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wants: list[bool] = []
        for mirror, tokens in fed:
            start = mirror.num_known + len(mirror.guesses)
            token_ids += tokens
            positions += range(start, start + len(tokens))
            slots += [mirror.slot] * len(tokens)
            wants += [False] * (len(tokens) - 1) + [True]
        ids, places, owners = (np.array(values, dtype=np.int32) for values in (token_ids, positions, slots))
        before = self._clock.now()
        logits = self._decoder.decode(Batch(ids, places, owners, np.array(wants, dtype=np.bool_)))
        if len(token_ids) == len(fed):
            self._costs.observe(1, len(fed), self._clock.now() - before)
        for mirror, tokens in fed:
            known = mirror.sequence.token_ids
            num_known = min(len(tokens), max(0, len(known) - mirror.num_known)) if not mirror.guesses else 0
            mirror.num_known += num_known
            mirror.guesses += tokens[num_known:]
        return [int(best) for best in logits.argmax(axis=1)]

    def _mirror_of(self, sequence: Sequence) -> _Mirror | None:
        mirror = self._mirrors.get(sequence.arrival)
        if mirror is None and self._free:
            mirror = self._mirrors[sequence.arrival] = _Mirror(sequence, self._free.pop(0))
        return mirror

    def _sweep(self) -> None:
        for arrival, mirror in list(self._mirrors.items()):
            if mirror.sequence.slot is None:
                self._forget(arrival)

    def _forget(self, arrival: int) -> None:
        mirror = self._mirrors.pop(arrival)
        self._decoder.release(mirror.slot)
        self._free.append(mirror.slot)
        self._free.sort()
