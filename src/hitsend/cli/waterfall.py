"""A flight record, drawn for a terminal.

Enters: the record's JSON (see `core/record.py`). Leaves: something rich can print. Always true: pure, the same record
gives the same picture; no text of the record is read as markup; a record that is still open or failed early is drawn as
far as it got. Next: `inspect/web/page.js`, which draws the same for a browser.
"""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hitsend.cli.course import course

BAR_WIDTH = 40
_BLOCKS = " ▏▎▍▌▋▊▉█"
_COLOURS = {
    "edge": "blue",
    "render": "cyan",
    "tokenize": "cyan",
    "wait": "yellow",
    "prefill_own": "magenta",
    "prefill_shared": "bright_magenta",
    "decode_own": "green",
    "decode_shared": "bright_green",
    "client_wait": "red",
    "settle": "blue",
}


def draw(record: dict[str, Any]) -> RenderableType:
    """Head, one bar per segment (each beginning where the one before ended), then tokens, money, limits and cells."""
    parts: list[RenderableType] = [_head(record), _bars(record)]
    parts.extend(Text(line) for line in _lines(record))
    return Group(*parts)


def money(microusd: int) -> str:
    """Micro-dollars as dollars, exactly: 1735 -> $0.001735."""
    sign = "-" if microusd < 0 else ""
    return f"{sign}${abs(microusd) // 1_000_000}.{abs(microusd) % 1_000_000:06d}"


def ttft_ms(record: dict[str, Any]) -> float | None:
    """Arrival to first token."""
    return next((float(event["at_ms"]) for event in record["events"] if event["type"] == "first_token"), None)


def tpot_ms(record: dict[str, Any]) -> float | None:
    """(end of the last step - first token) / (tokens - 1): undefined for one token, and for several choices at once."""
    first = ttft_ms(record)
    last = next((float(event["at_ms"]) for event in reversed(record["events"]) if event["type"] == "step"), None)
    tokens: int = record["usage"]["completion_tokens"]
    choices = sum(event["type"] == "choice_finished" for event in record["events"])
    if first is None or last is None or tokens < 2 or choices != 1 or record.get("steps_dropped"):
        return None
    return (last - first) / (tokens - 1)


def _head(record: dict[str, Any]) -> Text:
    head = Text()
    head.append(str(record["request_id"]), style="bold")
    facts = [record["model"], record["engine"] and f"on {record['engine']}", record["state"], record["finish_reason"]]
    head.append("  " + " · ".join(str(fact) for fact in facts if fact))
    if record["error"]:
        head.append(f"\n{record['error']['code']}: {record['error']['message']}", style="red")
    return head


def _bars(record: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="left")
    table.add_column(width=BAR_WIDTH, no_wrap=True)
    table.add_column(justify="right")
    table.add_column(justify="right")
    wall = record["wall_ms"]
    begun = 0.0
    for segment in record["segments"]:
        ms = segment["ms"]
        if ms > 0:
            bar = Text(_bar(begun, ms, wall), style=_COLOURS.get(segment["name"], "white"))
            share = f"{ms / wall:.1%}" if wall else ""
            table.add_row(Text(segment["name"].replace("_", " ")), bar, Text(f"{ms:.1f} ms"), Text(share))
        begun += ms
    table.add_row(Text("wall", style="bold"), Text(""), Text(f"{wall:.1f} ms", style="bold"), Text(""))
    return table


def _bar(begun: float, ms: float, wall: float) -> str:
    """A bar from `begun` for `ms` on a scale of `wall`, to an eighth of a character; never thinner than one eighth."""
    if wall <= 0:
        return ""
    start = min(round(begun / wall * BAR_WIDTH * 8), BAR_WIDTH * 8 - 1)
    length = max(1, min(round(ms / wall * BAR_WIDTH * 8), BAR_WIDTH * 8 - start))
    whole, eighths = divmod(length, 8)
    return " " * (start // 8) + "█" * whole + _BLOCKS[eighths].strip()


def _lines(record: dict[str, Any]) -> list[str]:
    usage = record["usage"]
    cost = money(record["cost_microusd"])
    tokens = f"{usage['prompt_tokens']} in ({usage['cached_tokens']} cached), {usage['completion_tokens']} out"
    lines = [*course(record, money), f"tokens   {tokens}   cost {cost}"]
    first, each = ttft_ms(record), tpot_ms(record)
    if first is not None:
        lines.append(f"speed    first token after {first:.1f} ms" + (f", then {each:.2f} ms each" if each else ""))
    steps = [event for event in record["events"] if event["type"] == "step"]
    if steps:
        shared = sum(step["batch_sequences"] for step in steps) / len(steps)
        count = len(steps) + record.get("steps_dropped", 0)
        lines.append(f"steps    {count}, with {shared:.1f} sequences in a batch on average")
    if record.get("drafts"):
        lines.append(_guesses(record["drafts"]))
    if record["cells"]["held"]:
        cells = record["cells"]
        lines.append(f"cells    {cells['before']} used before, {cells['held']} held, {cells['after']} used after")
    if record["limits"]:
        named = ((" of ".join(filter(None, (c["name"], c.get("level")))), c) for c in record["limits"])
        checks = (f"{name} {check['value']}/{check['limit']}" for name, check in named)
        lines.append("limits   " + ", ".join(checks))
    return lines


def _guesses(drafts: dict[str, Any]) -> str:
    """Who guessed ahead, and how much of it was right, in all and by position."""
    counts = list(zip(drafts["accepted"], drafts["proposed"], strict=True))
    by = " and ".join(name.replace("_", " ") for name in drafts.get("drafters", ()))
    places = " ".join(f"{right}/{all_of_them}" for right, all_of_them in counts)
    total = f"{sum(right for right, _ in counts)} of {sum(each for _, each in counts)} right"
    return f"guesses  {f'by {by}: ' if by else ''}{total}, by position {places}"
