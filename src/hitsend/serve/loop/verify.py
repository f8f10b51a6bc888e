"""Drafts in a step: who gets one, and what of it stays.

The rule is exact. At each position a token is sampled from the model's own distribution there, as always: the same
filters, penalties, grammar and random numbers. Where it equals the draft's token, the draft's cell already holds it,
and the next position's logits are there as well; where it doesn't, the sampled token stays, and the rest of the draft
is forgotten. (For drafts that are no random choice this is what rejection sampling comes to.) So every sequence says
what it would have said without drafts, token for token, as far as the model's arithmetic gives the same numbers.

Enters: a step's shares, and the logits of those with drafts. Leaves: shares with drafts, rows of the report. Always
true: drafts are added after everybody else has had what they need, only to steps in which no prompt is computed or
waits for its turn (else steps would be long and its turns few); they take no cell from anybody, since their cells are
free before the step and free again after it; whoever ends within its draft says nothing after its end. Next: `step.py`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.core.drafts import MAX_DRAFT, Drafted
from hitsend.core.request import SampledToken
from hitsend.serve.loop.decoder import Decoder, DecoderFailed
from hitsend.serve.loop.kv import AccountingBroken, CellPool
from hitsend.serve.loop.messages import Row
from hitsend.serve.loop.roster import Share
from hitsend.serve.loop.sampler import sample
from hitsend.serve.loop.sequence import Sequence
from hitsend.serve.loop.speculate import Lookup, StepCosts, draft_lengths

Accept = Callable[[Sequence, SampledToken | None], tuple[SampledToken, ...]]
"""Adds a token to its sequence, or ends it; returns what belongs into the output."""


class Proposer(Protocol):
    """Where drafts come from."""

    def name_for(self, sequence: Sequence) -> str:
        """Who guesses for this sequence now, for the record."""
        ...

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """How likely the next guess is right for each of them; 0 where there is none."""
        ...

    def longest(self, sequences: list[Sequence]) -> int:
        """Tokens that a draft may have, at least 1."""
        ...

    def propose(self, sequences: list[Sequence], length: int) -> list[tuple[int, ...]]:
        """Up to so many tokens that may follow in each."""
        ...

    def seconds(self, count: int, length: int) -> float:
        """What proposing so many tokens for so many sequences takes."""
        ...

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """What became of a draft."""
        ...


class PromptLookup:
    """Drafts from each sequence's own text."""

    def name_for(self, sequence: Sequence) -> str:  # noqa: ARG002  # the protocol's
        """The one name it has."""
        return "prompt_lookup"

    def chances(self, sequences: list[Sequence]) -> list[float]:
        """As far as the text went on like itself lately."""
        return [_lookup_of(sequence).chance for sequence in sequences]

    def longest(self, sequences: list[Sequence]) -> int:  # noqa: ARG002  # the protocol's
        """No guess is believed here before others were right."""
        return MAX_DRAFT

    def propose(self, sequences: list[Sequence], length: int) -> list[tuple[int, ...]]:
        """What followed elsewhere."""
        return [_lookup_of(sequence).draft(length) for sequence in sequences]

    def seconds(self, count: int, length: int) -> float:  # noqa: ARG002  # the protocol's, and the same for all
        """Nothing to speak of."""
        return 0.0

    def learn(self, sequence: Sequence, drafted: Drafted) -> None:
        """It compares all tokens anyway."""


class GoingBack(msgspec.Struct, frozen=True):
    """What the model can take back: at most `longest` tokens of a draft. `is_again`: of one sequence in a step only,
    and what is kept of a draft that was wrong somewhere has to be computed again.
    """

    longest: int = MAX_DRAFT
    is_again: bool = False


class Speculator:
    """Gives drafts to the decodes of a step, and remembers how long steps took.

    `alone`: what passes cost where one sequence is alone in a step. With prompt lookup, drafts then follow from what
    the sequence said so far and from nothing else, and the same seed gives the same passes again: a long sequence that
    is alone in a call has other last bits with a draft than without (see `engine/calls.py`), and no clock may choose.
    `going_back`: what the model can take back.
    """

    def __init__(
        self,
        proposer: Proposer,
        costs: StepCosts | None = None,
        alone: StepCosts | None = None,
        going_back: GoingBack = GoingBack(),  # noqa: B008  # it can't be changed
    ) -> None:
        self.proposer = proposer
        self._costs = costs or StepCosts()
        self._alone = alone or self._costs
        self._going_back = going_back

    def with_drafts(self, shares: list[Share], kv: CellPool, num_tokens: int) -> list[Share]:
        """The shares, some of them with drafts of together at most `num_tokens`."""
        if not all(share.is_decode for share in shares) or len({share.sequence.adapter for share in shares}) > 1:
            return shares  # several adapters are several calls, in which one could be alone
        if self._going_back.is_again and len(shares) > 1:
            return shares
        sequences = [share.sequence for share in shares]
        chances = self.proposer.chances(sequences)
        costs = self._costs if len(shares) > 1 else self._alone
        if not costs.is_known or not any(chances):
            return shares
        cells = kv.num_empty_cells  # what is kept for others lies in the other free ones
        longest = min(self._going_back.longest, cells, num_tokens, self.proposer.longest(sequences))
        most = [min(longest, _room(sequence, kv)) for sequence in sequences]
        lengths = draft_lengths(chances, most, costs, self.proposer.seconds, is_again=self._going_back.is_again)
        chosen = [sequence for sequence, length in zip(sequences, lengths, strict=True) if length]
        longest = max(lengths)
        if not chosen or longest * len(chosen) > min(num_tokens, cells):
            return shares
        drafts = dict(zip((each.arrival for each in chosen), self.proposer.propose(chosen, longest), strict=True))
        found = [drafts.get(sequence.arrival, ()) for sequence in sequences]
        if found.count(()) == 1 and len(shares) > 1:
            return shares  # see `draft_lengths`: nobody is left alone in a call
        return [
            msgspec.structs.replace(share, draft=draft) if draft else share
            for share, draft in zip(shares, found, strict=True)
        ]

    def observe(self, shares: list[Share], seconds: float) -> None:
        """So long the decoder took for the shares, all of them at once."""
        if all(share.is_decode for share in shares):
            lengths = [len(share.draft) for share in shares]
            calls = len(set(lengths)) if any(lengths) else 1
            self._costs.observe(calls, len(lengths) + sum(lengths), seconds)

    def verify(
        self, shares: list[Share], logits: NDArray[np.float32], kv: CellPool, decoder: Decoder, accept: Accept
    ) -> list[Row]:
        """Sample for each share of a step with drafts, and let the decoder forget what was guessed wrong.

        The pending tokens count as computed already. Raises DecoderFailed where the decoder can't go back.
        """
        ends = np.cumsum([0, *(1 + len(share.draft) for share in shares)]).tolist()
        rows: list[Row] = []
        for share, (start, end) in zip(shares, pairwise(ends), strict=True):
            sequence, slot = share.sequence, share.sequence.held_slot
            sampled, num_kept = _sample(share, logits[start:end], kv, accept)
            by = self.proposer.name_for(sequence) if share.draft else ""
            drafted = Drafted(sequence.choice, len(share.draft), num_kept, by) if share.draft else None
            rows.append(Row(sequence.request_id, sequence.choice, 0, 1 + num_kept, sampled, drafted=drafted))
            if drafted is not None:
                self.proposer.learn(sequence, drafted)
            has_more = sequence.slot is not None and num_kept < len(share.draft)
            if has_more and not decoder.truncate(slot, sequence.num_computed_tokens):
                raise DecoderFailed("the model can't forget the tokens of a draft", is_fatal=True)
        return rows


def _sample(
    share: Share, logits: NDArray[np.float32], kv: CellPool, accept: Accept
) -> tuple[tuple[SampledToken, ...], int]:
    """The tokens that the share's sequence says, and how many tokens of its draft are in its cache for good."""
    sequence, slot = share.sequence, share.sequence.held_slot
    sampled: tuple[SampledToken, ...] = ()
    for num_kept, guess in enumerate((*share.draft, None)):
        token = sample(logits[num_kept : num_kept + 1], [sequence.sampler])[0]
        sampled += accept(sequence, token)
        if sequence.slot is None or token is None or token.token_id != guess:
            break
        if not kv.hold_next(slot):
            raise AccountingBroken(f"slot {slot} has no cell for a token of its draft")
        kv.fill(slot, 1)
        sequence.computed(1, sequence.last_step)
    return sampled, num_kept


def _lookup_of(sequence: Sequence) -> Lookup:
    if sequence.lookup is None:
        sequence.lookup = Lookup(sequence.token_ids)
    sequence.lookup.catch_up()
    return sequence.lookup


def _room(sequence: Sequence, kv: CellPool) -> int:
    """Draft tokens that could all be kept: behind each of them at least one more token is sampled."""
    num_known = len(sequence.token_ids)
    return max(0, min(sequence.max_tokens - sequence.num_output_tokens, kv.max_sequence_tokens - num_known) - 1)
