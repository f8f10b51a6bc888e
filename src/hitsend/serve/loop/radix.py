"""A radix tree over token ids: runs that begin alike share the nodes of what they share.

Enters: runs of tokens, and something that stands for each. Leaves: how far a prompt is known, and who passes there.
Always true: every node but the root has at least one of them, and no node is split where nothing parts.
Next: `prefix_cache.py`.
"""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
T = TypeVar("T")


class Difference(NamedTuple):
    """Where a prompt leaves what is known: the token that was there before, and the prompt's own."""

    position: int
    known_token_id: int
    token_id: int


class Node(Generic[T]):
    """An edge's tokens, what goes on from its end, and all entries that pass through or end here, by id."""

    __slots__ = ("children", "entries", "parent", "tokens")

    def __init__(self, tokens: Ids | None = None, parent: "Node[T] | None" = None) -> None:
        self.tokens = np.empty(0, np.int32) if tokens is None else tokens
        self.parent = parent
        self.children: dict[int, Node[T]] = {}
        self.entries: dict[int, T] = {}


def walk(root: Node[T], tokens: Ids) -> tuple[list[tuple[Node[T], int]], int, Difference | None]:
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


def insert(root: Node[T], tokens: Ids, entry: T) -> None:
    """Put it on every node of its way."""
    node, at = root, 0
    node.entries[id(entry)] = entry
    while at < len(tokens):
        child = node.children.get(int(tokens[at]))
        if child is None:
            child = Node(tokens[at:], node)
            node.children[int(tokens[at])] = child
        elif (common := _common(child.tokens, tokens[at:])) < len(child.tokens):
            child = _split(child, common)
        child.entries[id(entry)] = entry
        node, at = child, at + len(child.tokens)


def take_out(root: Node[T], tokens: Ids, entry: T) -> None:
    """Take it from every node of its way, and away what that leaves without any."""
    node, at = root, 0
    del node.entries[id(entry)]
    while at < len(tokens):
        node = node.children[int(tokens[at])]
        del node.entries[id(entry)]
        at += len(node.tokens)
    _tidy(node)


def _common(one: Ids, other: Ids) -> int:
    size = min(len(one), len(other))
    places = np.flatnonzero(one[:size] != other[:size])
    return int(places[0]) if places.size else size


def _split(node: Node[T], at: int) -> Node[T]:
    """A new node for its first tokens, above it."""
    assert node.parent is not None
    upper = Node(node.tokens[:at], node.parent)
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens = node.tokens[at:]
    node.parent = upper
    upper.children[int(node.tokens[0])] = node
    upper.entries = dict(node.entries)
    return upper


def _tidy(node: Node[T]) -> None:
    """No node without entries, no split where nothing parts any more."""
    while not node.entries:
        if node.parent is None:
            return
        del node.parent.children[int(node.tokens[0])]
        node = node.parent
    if node.parent is not None and len(node.children) == 1:
        (child,) = node.children.values()
        if len(child.entries) == len(node.entries):
            child.tokens = np.concatenate([node.tokens, child.tokens])
            child.parent = node.parent
            node.parent.children[int(child.tokens[0])] = child
