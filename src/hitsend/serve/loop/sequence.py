"""One running choice: its tokens, its counters, where it lives, and what it may still do.

Enters: a `Submit` and which of its choices this is. Leaves: the one mutable object of the loop. Always true: the state
changes through `core.lifecycle` only, computed tokens never overtake known tokens, and a slot is held exactly while
running. Next: `kv.py`.
"""

from hitsend.core.lifecycle import State, advance
from hitsend.serve.loop.grammar import Constraint
from hitsend.serve.loop.messages import Submit
from hitsend.serve.loop.prefix_cache import Entry, ids
from hitsend.serve.loop.prompt_scores import PromptScores
from hitsend.serve.loop.radix import Ids
from hitsend.serve.loop.sampler import Sampler
from hitsend.serve.loop.shares import path_of
from hitsend.serve.loop.speculate import Lookup


class Sequence:
    """One choice of one request, from the queue to its end.

    `token_ids` are all known tokens, prompt first; the first `num_computed_tokens` of them are in the cache.
    `arrival` numbers choices in the order of their submission and never repeats. `path` is its tenant's place in
    `shares.py`. `ends` are the tokens that end it.
    `scores`: where the prompt's log-probabilities are wanted, how far they are; one object for all choices.
    `leader` computes the beginning of this prompt for somebody else, and is waited for; `entry` is what others may find
    of this one; a checkpoint is due at each of `checkpoints`. `num_cached_tokens` of the prompt came from the cache.
    `lookup`: its guesses at what it says next, from its first decode on where there are drafts.
    `first_at`: when the first step began that had its first token.
    `siblings` are the request's choices that haven't ended, this one among them, in order: the loop's own list.
    """

    __slots__ = (
        "adapter",
        "admitted_at",
        "arrival",
        "arrived_at",
        "boundaries",
        "cache_salt",
        "checkpoints",
        "choice",
        "constraint",
        "deadline_at",
        "deadline_s",
        "ends",
        "entry",
        "first_at",
        "has_looked",
        "is_fetching",
        "is_paused",
        "last_step",
        "leader",
        "lookup",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_parked_tokens",
        "num_prompt_tokens",
        "num_prompt_tokens_computed",
        "num_reuses",
        "path",
        "prompt_ids",
        "request_id",
        "sampler",
        "scores",
        "siblings",
        "slot",
        "state",
        "tier",
        "token_ids",
    )

    def __init__(
        self,
        submit: Submit,
        choice: int,
        arrival: int,
        at: float,
        *,
        constraint: Constraint | None = None,
        end_token_ids: frozenset[int] = frozenset(),
        breaker_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request_id = submit.request_id
        self.choice = choice
        self.arrival = arrival
        self.arrived_at = at
        self.tier = submit.tier
        self.adapter = submit.adapter
        self.path = path_of(submit.tenant)
        self.max_tokens = submit.max_tokens
        self.deadline_s = submit.deadline_s
        self.deadline_at = at + submit.deadline_s
        self.token_ids = list(submit.prompt_token_ids)
        self.num_prompt_tokens = len(submit.prompt_token_ids)
        self.num_computed_tokens = self.last_step = 0
        self.num_prompt_tokens_computed = self.num_cached_tokens = 0
        self.num_parked_tokens = self.num_reuses = 0
        self.cache_salt = submit.cache_salt
        self.boundaries = submit.boundaries
        self.prompt_ids = ids(submit.prompt_token_ids)
        self.checkpoints: tuple[int, ...] = ()
        self.leader: Sequence | None = None
        self.entry: Entry | None = None
        self.ends = end_token_ids.union(submit.sampling.stop_token_ids)
        self.siblings: list[Sequence] = [self]
        self.scores: PromptScores | None = None
        self.lookup: Lookup | None = None
        self.constraint = constraint
        self.sampler = Sampler(
            submit.sampling,
            submit.seeds[choice],
            submit.prompt_token_ids,
            constraint=constraint,
            end_token_ids=end_token_ids,
            breaker_ids=breaker_ids,
        )
        self.state = State.WAITING
        self.slot: int | None = None
        self.is_paused = self.has_looked = self.is_fetching = False
        self.admitted_at: float | None = None
        self.first_at: float | None = None

    @property
    def held_slot(self) -> int:
        """The slot of a running sequence; asking any other one is a bug."""
        if self.slot is None:
            raise LookupError(f"{self.request_id}/{self.choice} is {self.state} and holds no slot")
        return self.slot

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens that belong to the output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens that the cache doesn't have yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest sampled token is pending."""
        num_known = len(self.token_ids)  # asked nine times a step: without further properties
        return num_known > self.num_prompt_tokens and num_known - self.num_computed_tokens == 1

    @property
    def known_ids(self) -> Ids:
        """All known tokens, as the prefix cache takes them."""
        return self.prompt_ids if not self.num_output_tokens else ids(self.token_ids)

    @property
    def has_begun(self) -> bool:
        """Whether it has computed or sampled anything that it still has."""
        return self.num_computed_tokens > 0 or self.num_output_tokens > 0

    @property
    def is_scoring(self) -> bool:
        """Whether what it computes next has prompt tokens whose log-probabilities are wanted."""
        return self.scores is not None and self.scores.done < self.num_prompt_tokens

    def places_to_score(self, num_tokens: int) -> range:
        """Which positions of its next `num_tokens` have logits that say how likely the prompt's next token was."""
        if self.scores is None:
            return range(0)
        start = self.num_computed_tokens
        return self.scores.places(start, start + num_tokens, self.num_prompt_tokens)

    @property
    def waits_for_sibling(self) -> bool:
        """Whether another choice is computing the prompt that this one would have to compute, too.

        The one that got furthest with it does so for all; when that one ends or is preempted, the next one does.
        """
        if len(self.siblings) == 1 or self.has_begun:
            return False
        computing = [each for each in self.siblings if each.slot is not None and each.num_output_tokens == 0]
        return bool(computing) and max(computing, key=lambda each: each.num_computed_tokens) is not self

    @property
    def waits_for_other(self) -> bool:
        """Whether somebody else, of the same request or not, is computing what it would have to compute, too, or a file
        is being read for it."""
        return self.leader is not None or self.is_fetching or self.waits_for_sibling

    @property
    def has_prompt(self) -> bool:
        """Whether it has more than its newest token to compute, and nothing to wait for."""
        return not (self.is_decoding or self.is_paused or self.waits_for_other)

    @property
    def tokens_to_checkpoint(self) -> int:
        """How many tokens it may compute before a checkpoint is due, or all that it knows."""
        due = [point for point in self.checkpoints if point > self.num_computed_tokens]
        return (due[0] if due else len(self.token_ids)) - self.num_computed_tokens

    def cells_to_admit(self, reserve_tokens: int, limit: int) -> int:
        """Cells to hold at admission: all known tokens, and a reserve of at least one but no more than it can use."""
        left = self.max_tokens - self.num_output_tokens
        return min(limit, len(self.token_ids) + max(1, min(reserve_tokens, left)))

    def admit(self, slot: int, at: float) -> None:
        """It runs from now on."""
        self.state = advance(self.state, State.RUNNING)
        self.slot = slot
        if self.admitted_at is None:
            self.admitted_at = at

    def preempt(self) -> None:
        """Its cache is gone; its known tokens stay and will be computed again."""
        self.state = advance(self.state, State.PREEMPTED)
        self.slot = None
        self.num_computed_tokens = 0

    def computed(self, num_tokens: int, step: int) -> None:
        """So many more of its known tokens are in the cache. Of who has output, the prompt was computed before: by
        itself, or by the sibling that gave it a copy."""
        is_prompt = self.num_computed_tokens < self.num_prompt_tokens and not self.num_output_tokens
        self.num_computed_tokens += num_tokens
        if is_prompt:
            prompt_tokens = min(self.num_computed_tokens, self.num_prompt_tokens) - self.num_cached_tokens
            self.num_prompt_tokens_computed = max(self.num_prompt_tokens_computed, prompt_tokens)
        self.last_step = step

    def copied(self, num_tokens: int, step: int) -> None:
        """A sibling's cache, of so many tokens, is now its own too."""
        self.num_computed_tokens, self.is_fetching = num_tokens, False
        self.last_step = step

    def append(self, token_id: int) -> None:
        """A sampled token becomes known."""
        self.token_ids.append(token_id)
        self.sampler.note(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)

    def end(self, state: State) -> None:
        """It is over; whoever calls gives slot and cells back."""
        self.state = advance(self.state, state)
        self.slot = None
