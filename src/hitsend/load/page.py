"""The report as one HTML page: no script, nothing from outside, light and dark.

Enters: the document of `document.py` and the samples behind it. Leaves: a text. Always true: every text from outside
goes through `html.escape`; a policy in the page forbids anything but its own styles; without a figure there is no plot.
Next: `charts.py`.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

from hitsend.load.charts import bars, curves, dots
from hitsend.load.compare import Ratio
from hitsend.load.document import title
from hitsend.load.plots import bins, tokens_over_time
from hitsend.load.report import Level
from hitsend.load.result import Measured, Run

MOST_DOTS = 2000
"""Requests drawn one by one; of more, every k-th."""

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#5b6470;--line:#d8dde3;--tint:#f4f6f8;--bad:#b3261e;
--a:#2563c9;--b:#c2571a;--c:#23804a;--d:#8a3fb0}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--soft:#9aa4af;--line:#343b43;--tint:#1d2227;
--bad:#ff8a80;--a:#7fb0ff;--b:#ffa66b;--c:#6fd39a;--d:#d39bf0}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:78rem;
padding:1.5rem;overflow-wrap:anywhere}
h1{font-size:1.4rem;margin:0}h2{font-size:1.15rem;margin:2rem 0 .3rem}h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.3rem 0}.soft,figcaption{color:var(--soft)}.bad{color:var(--bad)}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}thead th{color:var(--soft);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,18rem),1fr));gap:1rem}svg{width:100%;height:auto;display:block}
figure{margin:0;background:var(--tint);padding:.6rem;border-radius:.4rem}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}.axis{stroke:var(--line)}
.k0{--k:var(--a)}.k1{--k:var(--b)}.k2{--k:var(--c)}.k3{--k:var(--d)}
.line{fill:none;stroke:var(--k);stroke-width:2}.dot,.bar{fill:var(--k)}svg .name{fill:var(--k)}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_COLUMNS = (
    ("load", None),
    ("answers", None),
    ("failed", None),
    ("requests/s", "requests_per_s"),
    ("output tokens/s", "output_tokens_per_s"),
    ("all tokens/s", "total_tokens_per_s"),
    ("goodput/s", "goodput_per_s"),
)
_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))


def page(run: Run, document: dict[str, Any]) -> str:
    """The whole page."""
    names = ", ".join(one.target.name for one in run.targets)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="content-security-policy" content="{escape(_POLICY)}">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>hitsend load: {escape(names)}</title><style>{_STYLE}</style></head><body>",
        *_head(document),
        *_warnings(document["warnings"]),
        *_ratios(document["ratios"], run.plan.rounds),
    ]
    for number, one in enumerate(run.targets):
        parts += _target(document["targets"][number], one.measured)
    return "\n".join([*parts, "</body></html>", ""])


def _head(document: dict[str, Any]) -> Iterator[str]:
    machine, work = document["machine"], document["workload"]
    lengths = f"{work['input']} in, {work['output']} out" + (f", {work['turns']} turns" if work["turns"] > 1 else "")
    if work["trace_lines"]:
        lengths = f"a trace of {work['trace_lines']} requests"
    shared = f"{work['system_tokens']} tokens of shared system prompt, " if work["system_tokens"] else ""
    client = f"client on {machine['architecture']}, {machine['cores']} cores, Python {machine['python']}"
    yield f"<h1>Load test</h1><p class=soft>{escape(document['date'])} · hitsend {escape(document['hitsend'])} · "
    yield f"{escape(client)}</p><p>Workload: {escape(shared + lengths)} (tokens)."
    limits = [f"{name.removesuffix('_ms').upper()} ≤ {value:g} ms" for name, value in document["slo"].items() if value]
    yield f" Good answers keep {escape(', '.join(limits))}.</p>" if limits else "</p>"
    if document["note"]:
        yield f"<p>{escape(document['note'])}</p>"


def _warnings(found: list[str]) -> Iterator[str]:
    if found:
        items = "".join(f"<li>{escape(text)}</li>" for text in found)
        yield f"<h2>Read this first</h2><ul class=bad>{items}</ul>"


def _ratios(found: list[dict[str, Any]], rounds: int) -> Iterator[str]:
    if found:
        yield "<h2>Compared</h2><p class=soft>Ratios of medians; in brackets the least and greatest of the rounds.</p>"
        yield "<div class=wide><table><thead><tr><th>load</th><th>figure</th><th>of</th><th>to</th><th>ratio</th></tr>"
        yield "</thead><tbody>"
        for row in found:
            cells = (f"{row['by']} {row['load']:g}", row["metric"], row["target"], row["base"])
            shown = Ratio(**row).said(rounds)
            yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*cells, shown)) + "</tr>"
        yield "</tbody></table></div>"


def _target(target: dict[str, Any], measured: list[Measured]) -> Iterator[str]:
    yield f"<h2>{escape(target['name'])}</h2><p class=soft>{escape(target['model'])} at {escape(target['url'])}"
    yield f" · prompt lengths {escape(target['prompt_lengths'])}</p>"
    found = target["saturation"]
    if found and found["at"] is not None:
        beyond = "more load brings no more" if found["is_reached"] else "not reached in these levels"
        tokens = f"{found['output_tokens_per_s']:.1f} output tokens/s"
        yield f"<p>Saturation: {escape(found['by'])} {found['at']:g}, {tokens}; {beyond}.</p>"
    yield from _table([one.level for one in measured])
    yield from _over_loads([one.level for one in measured])
    for one in measured:
        yield from _level(one)


def _table(levels: list[Level]) -> Iterator[str]:
    heads = [name for name, _ in _COLUMNS]
    heads += [f"{name} {part}" for name, _ in _LATENCIES for part in ("p50", "p90", "p99")]
    yield "<div class=wide><table><thead><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr></thead><tbody>"
    for level in levels:
        cells = [title(level), str(level.requests.ok), str(level.requests.errors)]
        cells += [_number(getattr(level, field)) for _, field in _COLUMNS if field is not None]
        for _, field in _LATENCIES:
            found = getattr(level, field)
            cells += [_number(found and getattr(found, part)) for part in ("p50", "p90", "p99")]
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div><p class=soft>Latencies in ms, from the instant at which a request was to be sent.</p>"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _over_loads(levels: list[Level]) -> Iterator[str]:
    """Lines over the loads of the first round, where there are several."""
    first = [one for one in levels if one.round == 0 and (one.concurrency or one.rate_per_s)]
    first.sort(key=lambda one: one.concurrency or one.rate_per_s or 0.0)
    if len(first) < 2:
        return
    loads = [float(one.concurrency or one.rate_per_s or 0.0) for one in first]
    kind = "requests at once" if first[0].concurrency else "requests per second"
    speed = [("output tokens/s", [one.output_tokens_per_s for one in first])]
    late = [
        (f"TTFT {part}", [getattr(one.ttft_ms, part) if one.ttft_ms else None for one in first])
        for part in ("p50", "p99")
    ]
    pace = [
        (f"TPOT {part}", [getattr(one.tpot_ms, part) if one.tpot_ms else None for one in first])
        for part in ("p50", "p99")
    ]
    yield "<div class=plots>"
    yield curves(f"Output tokens/s over {kind}", loads, speed)
    yield curves(f"TTFT in ms over {kind}", loads, late)
    yield curves(f"TPOT in ms over {kind}", loads, pace)
    yield "</div>"


def _level(one: Measured) -> Iterator[str]:
    whole = [sample for sample in one.samples if sample.outcome == "ok"]
    if not whole:
        return
    yield f"<h3>{escape(title(one.level))}</h3><div class=plots>"
    yield bars("TTFT, ms", bins([sample.ttft_ms or 0.0 for sample in whole], 30))
    yield bars("TPOT, ms", bins([at for sample in whole if (at := sample.tpot_ms) is not None], 30))
    every = max(1, len(whole) // MOST_DOTS)
    points = [(sample.intended_s, sample.e2e_ms or 0.0) for sample in whole[::every]]
    yield dots("E2E in ms, by the second it was to be sent", points)
    rates = tokens_over_time(one.samples, one.level.wall_s, 40)
    width = one.level.wall_s / 40
    yield curves("Output tokens/s over time, s", [(at + 0.5) * width for at in range(40)], [("", list(rates))])
    yield "</div>"
