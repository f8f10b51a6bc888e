"""Charts as inline SVG.

Enters: numbers and names. Leaves: `<figure>`s. Always true: names are escaped; axes say their least and greatest value;
both begin at 0 but for a histogram's; colours come from the page, so that they follow light and dark. Next: `plots.py`.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from hitsend.load.plots import Bins

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 18, 24


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, low_x: float, high_x: float, high_y: float) -> None:
        self._low_x, self._width = low_x, (high_x - low_x) or 1.0
        self._high_y = high_y or 1.0
        self.bottom = HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self._low_x) / self._width * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.bottom - value / self._high_y * (self.bottom - TOP)

    def axes(self, high_x: float) -> str:
        marks = [
            f"<line class=axis x1={LEFT} y1={self.y(part):.1f} x2={WIDTH - RIGHT} y2={self.y(part):.1f} />"
            f"<text x={LEFT - 5} y={self.y(part) + 4:.1f} text-anchor=end>{_short(part)}</text>"
            for part in (0.0, self._high_y / 2, self._high_y)
        ]
        ends = ((self._low_x, "start"), (high_x, "end"))
        marks += [
            f"<text x={self.x(at):.1f} y={HEIGHT - 8} text-anchor={anchor}>{_short(at)}</text>" for at, anchor in ends
        ]
        return "".join(marks)


def _figure(caption: str, inside: str) -> str:
    shown = escape(caption)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{shown}">{inside}</svg>'
    return f"<figure>{picture}<figcaption>{shown}</figcaption></figure>"


def curves(caption: str, xs: Sequence[float], lines: Sequence[tuple[str, Sequence[float | None]]]) -> str:
    """One line per name over common x values; a None is a gap."""
    known = [value for _, line in lines for value in line if value is not None]
    if not known:
        return ""
    frame = _Frame(0.0, max(xs), max(known))
    parts = [frame.axes(max(xs))]
    for number, (name, line) in enumerate(lines):
        pairs = zip(xs, line, strict=True)
        pieces = [list(piece) for is_known, piece in groupby(pairs, lambda pair: pair[1] is not None) if is_known]
        drawn = [[(frame.x(x), frame.y(value or 0.0)) for x, value in piece] for piece in pieces]
        paths = [" ".join(f"{x:.1f},{y:.1f}" for x, y in piece) for piece in drawn]
        shown = "".join(f'<polyline class=line points="{path}" />' for path in paths)
        points = [point for piece in drawn for point in piece]
        marks = "".join(f"<circle class=dot cx={x:.1f} cy={y:.1f} r=2.5 />" for x, y in points) if name else ""
        label = f"<text class=name x={LEFT + 6 + number * 90} y=12>{escape(name)}</text>"
        parts.append(f"<g class=k{number % 4}>{shown}{marks}{label}</g>")
    return _figure(caption, "".join(parts))


def bars(caption: str, found: Bins | None) -> str:
    """A histogram; pointing at a bar says what it holds."""
    if found is None:
        return ""
    frame = _Frame(found.low, found.high, max(found.counts))
    width = (found.high - found.low) / len(found.counts)
    parts = [frame.axes(found.high)]
    step = (WIDTH - LEFT - RIGHT) / len(found.counts)
    for number, count in enumerate(found.counts):
        x, y = LEFT + number * step, frame.y(count)
        last = " and more" if number == len(found.counts) - 1 else ""
        told = f"{count} from {_short(found.low + number * width)} to {_short(found.low + (number + 1) * width)}{last}"
        size = f"width={max(1.0, step - 1):.1f} height={frame.bottom - y:.1f}"
        parts.append(f"<rect class=bar x={x:.1f} y={y:.1f} {size}><title>{told}</title></rect>")
    return _figure(caption, f"<g class=k0>{''.join(parts)}</g>")


def dots(caption: str, points: Sequence[tuple[float, float]]) -> str:
    """One dot per request."""
    if not points:
        return ""
    high_x = max(x for x, _ in points)
    frame = _Frame(0.0, high_x, max(y for _, y in points))
    marks = "".join(f"<circle class=dot cx={frame.x(x):.1f} cy={frame.y(y):.1f} r=2 />" for x, y in points)
    return _figure(caption, f"<g class=k1>{frame.axes(high_x)}{marks}</g>")
