"""How far somebody who guesses is believed, by sequence: a head of the model's, or a second model.

How often they are right is only known where they were checked, and each check costs. So the first guess for a sequence
is one token. Right, and drafts are as long as it pays by what was right lately, until nobody has made use of them for a
while; wrong, and nothing is asked for a while, each time for twice as long. Where they help nobody (`is_shared`), ever
fewer new sequences are tried at all, and they rest longer, too.

Enters: what became of drafts. Leaves: chances, and how long a draft may be. Always true: unless it is shared, what is
believed of a sequence follows from itself alone. Next: `own_head.py`, `draft_model.py`.
"""

from hitsend.core.drafts import MAX_DRAFT, Drafted
from hitsend.serve.loop.sequence import Sequence

FIRST_CHANCE = 0.6
"""How often guesses are believed to be right before anything is known of them."""

_BELIEF = 2.0
"""So many guesses' worth."""

_MEMORY = 0.95
"""What a guess still counts after the next one."""

FIRST_REST, LONGEST_REST = 16, 256
"""Steps for which nothing is asked after a useless draft."""

MOST_UNTRIED = 31
"""So many sequences at most go by between two that are tried."""


class _Trust:
    """In the guesses for one sequence."""

    __slots__ = ("first_chance", "hits", "idle", "is_tested", "pause", "rest", "sequence", "trials")

    def __init__(self, sequence: Sequence, first_chance: float) -> None:
        self.sequence = sequence
        self.first_chance = first_chance
        self.hits = self.trials = 0.0
        self.is_tested = False
        self.idle, self.rest, self.pause = 0, 0, FIRST_REST

    @property
    def chance(self) -> float:
        if self.rest:
            return 0.0
        believed = (self.hits + _BELIEF * self.first_chance) / (self.trials + _BELIEF)
        return believed if self.is_tested else max(believed, self.first_chance)

    def wait(self, num_steps: int) -> None:
        """So many more steps. What nobody made use of for long is tried again, in case that the text has changed."""
        self.rest = max(0, self.rest - num_steps)
        self.idle += num_steps
        if self.idle > self.pause:
            self.is_tested = False

    def learn(self, num_right: int, num_wrong: int) -> None:
        fade = _MEMORY ** (num_right + num_wrong)
        self.hits = fade * self.hits + num_right
        self.trials = fade * self.trials + num_right + num_wrong
        self.idle = 0
        if num_right:
            self.is_tested, self.pause = True, FIRST_REST
        elif not self.is_tested:  # else what is believed by now says whether to go on
            self.rest, self.pause = self.pause, min(2 * self.pause, LONGEST_REST)


class Trusts:
    """Of all sequences. `is_shared`: what came of one sequence's first guess counts for who comes later."""

    def __init__(self, first_chance: float = FIRST_CHANCE, *, is_shared: bool = False) -> None:
        self._first_chance = first_chance
        self._is_shared = is_shared
        self._by_arrival: dict[int, _Trust | None] = {}
        self._running: dict[int, Sequence] = {}
        self._untried = self._pass_over = 0
        self._asked_of: list[Sequence] = []
        self._quiet = self._skipped = 0

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """How likely the next guess is right, as far as is known. To be asked once a step.

        While all of the same sequences rest, which is most of the time where guesses help nobody, their steps are only
        counted.
        """
        if self._quiet and sequences == self._asked_of:
            self._quiet -= 1
            self._skipped += 1
            return [0.0] * len(sequences)
        for sequence in self._asked_of if self._skipped else ():
            trust = self._by_arrival.get(sequence.arrival)
            if trust is not None:
                trust.wait(self._skipped)
        self._skipped = 0
        if len(self._running) > len(sequences):
            self._running = {key: each for key, each in self._running.items() if each.slot is not None}
            self._by_arrival = {key: self._by_arrival[key] for key in self._running}
        found: list[float] = []
        quiet = LONGEST_REST
        for sequence in sequences:
            trust = self._of(sequence)
            if trust is not None:
                trust.wait(1)
                quiet = min(quiet, trust.rest)
            found.append(0.0 if trust is None else trust.chance)
        self._asked_of, self._quiet = list(sequences), max(0, quiet - 1)
        return found

    def longest(self, sequences: list[Sequence]) -> int:
        """Tokens that a draft may have: one, until a guess for one of them was right."""
        known = (self._by_arrival.get(each.arrival) for each in sequences)
        return MAX_DRAFT if any(trust is not None and trust.is_tested for trust in known) else 1

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """What became of a draft."""
        trust = self._by_arrival.get(sequence.arrival)
        if trust is None:
            return
        if drafted.accepted:
            self._pass_over = 0
        elif not trust.trials:
            self._pass_over = min(2 * self._pass_over + 1, MOST_UNTRIED)
            if self._is_shared:  # a trial takes a call of its own, and catching up
                trust.pause = min(FIRST_REST * self._pass_over, LONGEST_REST)
        trust.learn(drafted.accepted, int(drafted.accepted < drafted.proposed))

    def _of(self, sequence: Sequence) -> _Trust | None:
        key = sequence.arrival
        if key not in self._running:
            self._running[key] = sequence
            is_tried = not self._is_shared or self._untried >= self._pass_over
            self._untried = 0 if is_tried else self._untried + 1
            self._by_arrival[key] = _Trust(sequence, self._first_chance) if is_tried else None
        return self._by_arrival[key]
