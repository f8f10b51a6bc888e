"""An answer on the screen while it comes.

Enters: pieces of text. Leaves: Markdown in a terminal, the bare text in a pipe. Always true: what was finished is
printed once and never touched again (only the last block is redrawn, so an answer may be longer than the screen), and
no text can drive the terminal. Next: `chat.py`.
"""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from hitsend.cli.send import safe

_THOUGHT_CHARS = 400


class Painter(Protocol):
    """Shows one answer, as a `with` block."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The answer is over, or was cut off."""
        ...

    def add(self, text: str, thought: str = "") -> None:
        """More of it."""
        ...


class PlainPainter:
    """Text as it comes; thoughts aren't shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()

    def add(self, text: str, thought: str = "") -> None:  # noqa: ARG002  # as the protocol has it
        """Write it."""
        sys.stdout.write(text)
        sys.stdout.flush()


class MarkdownPainter:
    """Markdown, drawn anew a dozen times a second."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, transient=False)
        self._thought = ""
        self._open = ""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.update(self._markdown(self._open) if self._open.strip() else Text(), refresh=True)
        self._live.stop()

    def add(self, text: str, thought: str = "") -> None:
        """Print the blocks that are complete now, redraw the one that isn't."""
        self._thought = "" if text else (self._thought + safe(thought))[-_THOUGHT_CHARS:]
        finished, self._open = finished_blocks(self._open + safe(text))
        if finished:
            self._console.print(self._markdown(finished), "")
        self._live.update(self._drawn())

    def _drawn(self) -> RenderableType:
        if self._thought:
            return Group(Text("thinking", style="dim italic"), Text(self._thought.strip(), style="dim"))
        return self._markdown(self._open)

    def _markdown(self, text: str) -> RenderableType:
        # rich fills lines with blanks: the terminal's own ^C would go to the next line and spoil the redrawing
        return Constrain(Markdown(text), self._console.width - len("^C"))


def finished_blocks(text: str) -> tuple[str, str]:
    """Split Markdown where nothing that comes later can change what stands before: (finished, open).

    That is a blank line outside of a code fence, followed by a line that isn't indented and begins no list item.
    """
    cut, fence, at, is_after_blank = 0, "", 0, False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        mark = bare[:3] if bare.startswith(("```", "~~~")) else ""
        is_whole = line.endswith("\n") or len(bare) > 4
        if is_after_blank and bare and is_whole and not line[0].isspace() and not _begins_item(bare):
            cut = at
        if mark and not fence:
            fence = mark
        elif fence and mark == fence and bare.strip(mark[0]) == "":
            fence = ""
        is_after_blank = not fence and (not bare or (is_after_blank and not bare))
        at += len(line)
    return text[:cut], text[cut:]


def _begins_item(line: str) -> bool:
    marker = line.split(maxsplit=1)[0]
    return marker in ("-", "*", "+") or (marker[:-1].isdigit() and marker[-1] in ".)")
