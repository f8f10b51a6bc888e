"""Guesses at what a sequence says next, and what became of them.

Enters: how many tokens were guessed in a step, and how many of them were right. Leaves: counts by position. Always
true: a guess behind a wrong one counts as wrong, whatever it was: nobody can use it. Next: `events.py`.
"""

import msgspec

MAX_DRAFT = 15
"""Tokens that are guessed in a row, at most: the positions that are counted."""


class Drafted(msgspec.Struct, frozen=True, omit_defaults=True):
    """One choice's guess in one step: of `proposed` tokens the first `accepted` became part of the answer. `drafter`
    made it: `prompt_lookup`, `draft` (a second model) or `mtp` (the model's own head).
    """

    choice: int
    proposed: int
    accepted: int
    drafter: str = ""


class DraftCounts:
    """How often each position of a guess was proposed, and how often it was right."""

    def __init__(self) -> None:
        self.proposed = [0] * MAX_DRAFT
        self.accepted = [0] * MAX_DRAFT
        self.drafters: set[str] = set()

    def add(self, drafted: Drafted) -> None:
        """One more guess."""
        self.drafters.add(drafted.drafter)
        for position in range(drafted.proposed):
            self.proposed[position] += 1
            self.accepted[position] += position < drafted.accepted

    def shown(self) -> dict[str, list[int] | list[str]] | None:
        """By position, as far as anything was guessed, and who guessed; None where nothing was."""
        count = sum(map(bool, self.proposed))
        if not count:
            return None
        shown: dict[str, list[int] | list[str]] = {"proposed": self.proposed[:count], "accepted": self.accepted[:count]}
        by = sorted(filter(None, self.drafters))
        return shown | ({"drafters": by} if by else {})
