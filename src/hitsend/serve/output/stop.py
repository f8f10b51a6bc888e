"""Stop strings: found wherever they straddle tokens, and never shown in part.

Enters: text, cut anywhere. Leaves: text that can't be part of a stop string any more, and the stop that ended it.
Always true: only the longest proper prefix of a stop that the text ends with is held, so a client sees text as early as
is safe; the work per character is constant (Aho and Corasick's automaton), whatever the stops.

The rule when several match: **the stop that completes first wins; of those that complete at the same character, the
longest**. It is the only rule that never waits for text that may not come, and it doesn't depend on how the text was
cut. What follows the match is dropped, what stands before its first character is shown (and the match itself where the
client wants it). Next: `source.py`.
"""

from collections import deque


class _Node:
    """One prefix of some stop: `depth` is its length, `found` the longest stop that ends here."""

    __slots__ = ("depth", "found", "next", "shorter")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.next: dict[str, _Node] = {}
        self.shorter: _Node | None = None
        self.found: str | None = None


def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.found = stop
    queue = deque(root.next.values())
    for node in queue:
        node.shorter = root
    while queue:
        node = queue.popleft()
        for char, child in node.next.items():
            child.shorter = _step(node.shorter, char, root)
            child.found = child.found or child.shorter.found
            queue.append(child)
    return root


def _step(node: "_Node | None", char: str, root: _Node) -> _Node:
    """The longest prefix of a stop that ends with `char`, when the text before it ended in `node`."""
    while node is not None:
        child = node.next.get(char)
        if child is not None:
            return child
        node = node.shorter
    return root


class StopMatcher:
    """Watches one choice's text. `stops` are non-empty strings, or none. `shows_match`: the stop is shown."""

    def __init__(self, stops: tuple[str, ...], *, shows_match: bool = False) -> None:
        self._shows_match = shows_match
        self._root = _automaton(stops)
        self._node = self._root
        self._held = ""
        self._has_stops = bool(stops)
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """Text kept back because it may be the beginning of a stop."""
        return self._held

    def feed(self, text: str) -> str:
        """Take the next text, return what may be shown. Once `matched` is set, everything later is dropped."""
        if not self._has_stops:
            return text
        if self.matched is not None:
            return ""
        node, root = self._node, self._root
        for position, char in enumerate(text):
            node = _step(node, char, root)
            if node.found is not None:
                return self._match(node.found, text[: position + 1])
        self._node = node
        known = self._held + text
        cut = len(known) - node.depth
        self._held = known[cut:]
        return known[:cut]

    def finish(self) -> str:
        """No more text will come: what was held is ordinary text after all."""
        held, self._held = self._held, ""
        self._node = self._root
        return held

    def _match(self, stop: str, text: str) -> str:
        known = self._held + text
        self.matched, self._held = stop, ""
        return known if self._shows_match else known[: len(known) - len(stop)]
