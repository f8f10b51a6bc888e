"""Holding one sequence to a grammar: what may come next, and what follows from a token that came.

    opening     the first tokens decide whether there is reasoning      (only with `opens_with`)
    thinking    free, until the ids of `starts_after`; at its budget these are forced
    answering   the grammar's mask, or free where there is no grammar

Enters: a `ConstraintSpec`, a `Matcher` for its grammar. Leaves: rows of logits with -inf where a token is not allowed.
Always true: nothing here knows a grammar library; a matcher that fails ends its own sequence and no other; a sequence
under a grammar can't end while it thinks, so that a finished answer is a whole one. Next: `sampler.py`.
"""

from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.errors import EngineFailed, InvalidRequest, ServeError

_NEVER = np.float32(-np.inf)


class GrammarFailed(Exception):
    """The matcher can't go on. `is_too_complex`: its limits were reached, so the grammar is to blame."""

    def __init__(self, message: str, *, is_too_complex: bool = False) -> None:
        super().__init__(message)
        self.is_too_complex = is_too_complex

    def as_error(self) -> ServeError:
        """What the caller is told."""
        if self.is_too_complex:
            return InvalidRequest(f"The grammar became too complex: {self}", param="response_format")
        return EngineFailed(f"The grammar failed: {self}")


class Matcher(Protocol):
    """One output on its way through a grammar. End tokens are allowed exactly where the output may end."""

    def forbidden(self) -> NDArray[np.bool_]:
        """True for each token that may not come next; valid until the next call. Raises GrammarFailed."""
        ...

    def accept(self, token_id: int) -> None:
        """The token came. Raises GrammarFailed."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token can follow."""
        ...


class Grammars(Protocol):
    """Makes matchers."""

    def matcher(self, grammar: str) -> Matcher:
        """A fresh one. Raises GrammarFailed."""
        ...


class _Phase(Enum):
    OPENING = 1
    THINKING = 2
    ANSWERING = 3


class Constraint:
    """See the module's docstring. `failure` is set once and for all when the matcher failed."""

    def __init__(self, spec: ConstraintSpec, matcher: Matcher | None, end_token_ids: frozenset[int]) -> None:
        self._spec = spec
        self._matcher = matcher
        self._close = spec.starts_after or ()
        self._end_ids = np.array(sorted(end_token_ids), dtype=np.intp)
        self._forced: list[int] = []
        self._tail: list[int] = []
        self._num_thoughts = 0
        self.failure: ServeError | None = None
        self._phase = _Phase.ANSWERING
        if self._close:
            self._phase = _Phase.OPENING if spec.opens_with else _Phase.THINKING
        self._force_close_at_budget()

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return self._phase is _Phase.ANSWERING and self._matcher is not None and self._matcher.is_complete

    def restrict(self, row: NDArray[np.float32]) -> None:
        """Give every token that isn't allowed next a logit of -inf. Never raises: see `failure`."""
        try:
            self._restrict(row)
        except GrammarFailed as failed:
            self.failure = failed.as_error()

    def _restrict(self, row: NDArray[np.float32]) -> None:
        if self._forced:
            wanted = self._forced[0]
            row.fill(_NEVER)
            row[wanted] = 0.0
        elif self._matcher is None:
            return
        elif self._phase is _Phase.THINKING:
            row[self._end_ids] = _NEVER
        else:
            forbidden = self._matcher.forbidden()
            if self._phase is _Phase.OPENING:
                forbidden[self._spec.opens_with[0]] = False
            np.copyto(row[: forbidden.size], _NEVER, where=forbidden)
            row[forbidden.size :] = _NEVER

    def accept(self, token_id: int) -> None:
        """The token was appended to the output. Never raises: see `failure`."""
        try:
            if self._phase is _Phase.OPENING:
                self._open(token_id)
            elif self._phase is _Phase.THINKING:
                self._think(token_id)
            elif self._matcher is not None:
                self._matcher.accept(token_id)
        except GrammarFailed as failed:
            self.failure = failed.as_error()

    def _open(self, token_id: int) -> None:
        opening = self._spec.opens_with
        self._tail.append(token_id)
        is_begun = tuple(self._tail) == opening[: len(self._tail)]
        missing = opening[len(self._tail) :] if is_begun else ()
        self._forced = list(missing) if self._matcher is not None else []
        if missing:
            return
        self._tail = []
        self._phase = _Phase.THINKING if is_begun else _Phase.ANSWERING
        if is_begun:
            self._force_close_at_budget()
        elif self._matcher is not None:
            self._matcher.accept(token_id)

    def _think(self, token_id: int) -> None:
        self._num_thoughts += 1
        self._tail = [*self._tail, token_id][-len(self._close) :]
        if self._forced:
            self._forced.pop(0)
        if tuple(self._tail) == self._close:
            self._forced = []
            self._phase = _Phase.ANSWERING
        elif not self._forced:
            self._force_close_at_budget()

    def _force_close_at_budget(self) -> None:
        """Force what is missing of the closing ids: the reasoning may just have begun to write them itself."""
        budget = self._spec.thinking_budget
        if self._phase is not _Phase.THINKING or budget is None or self._num_thoughts < budget:
            return
        begun = next(
            (n for n in range(len(self._close) - 1, 0, -1) if tuple(self._tail[-n:]) == self._close[:n]),
            0,
        )
        self._forced = list(self._close[begun:])


def constraint_for(
    spec: ConstraintSpec | None, grammars: Grammars | None, end_token_ids: frozenset[int]
) -> Constraint | None:
    """What holds a new sequence, or None where nothing does. Raises GrammarFailed."""
    if spec is None or (spec.grammar is None and spec.thinking_budget is None):
        return None
    if spec.grammar is None:
        return Constraint(spec, None, end_token_ids)
    if grammars is None:
        raise GrammarFailed("this engine has no grammars")
    return Constraint(spec, grammars.matcher(spec.grammar), end_token_ids)
