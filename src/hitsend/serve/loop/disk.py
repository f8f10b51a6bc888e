"""The place behind host memory: saved state in files, as the loop sees it.

Enters: saved bytes that have to make way. Leaves: the same bytes later, or None. Always true: `put` never waits (what
can't be taken now isn't taken), whatever is wrong with a file makes a miss and nothing else, and what was put for one
salt and one run of tokens comes back for these only. Next: `prefix_cache.py`.
"""

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Stored(NamedTuple):
    """Where a copy lies, and how long it is."""

    number: int
    num_bytes: int


class Disk(Protocol):
    """Files of one engine. Numbers never repeat."""

    @property
    def problem(self) -> str | None:
        """Why nothing more is written; None while all is well."""
        ...

    def takes(self, num_bytes: int) -> bool:
        """Whether `put` would take so many bytes now."""
        ...

    def put(self, salt: str, tokens: NDArray[np.int32], saved: NDArray[np.uint8]) -> int:
        """Have it written; returns its number. The bytes mustn't change any more."""
        ...

    def fetch(self, number: int) -> bool:
        """Whether `get` wouldn't be long now. If it would, have it read meanwhile: ask again."""
        ...

    def get(self, number: int, salt: str, tokens: NDArray[np.int32]) -> NDArray[np.uint8] | None:
        """What was put; None where it can't be had, or is not what was put for this salt and these tokens."""
        ...

    def drop(self, number: int) -> None:
        """Nobody will ask for it any more."""
        ...
