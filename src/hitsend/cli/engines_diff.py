"""`hitsend engines diff`: the same request to two models of a running server, side by side.

Enters: two served names and a prompt. Leaves: for each its engine, its rendered prompt and token counts, the defaults
in force, what was left out, answer, usage, price and time; as columns or one JSON document. Always true: both are asked
the same, one after the other, and billed as any request; what one of them can't tell is missing there, and a refusal is
a result. Next: `client.py`.
"""

import difflib
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hitsend.cli import CallFailed
from hitsend.cli.client import Client
from hitsend.cli.send import safe

_SHOWN = (
    "engine",
    "prompt_tokens",
    "usage",
    "sampling",
    "dropped",
    "finish_reason",
    "cost_microusd",
    "wall_ms",
    "error",
)


async def compare(client: Client, models: tuple[str, str], body: dict[str, Any]) -> dict[str, Any]:
    """Ask both. What differs stands once more under `differs`."""
    sides = [await _side(client, body | {"model": model}) for model in models]
    first, second = sides
    prompts = [side["rendered"] for side in sides]
    lines = None
    if all(prompt is not None for prompt in prompts):
        before, after = (prompt.splitlines() for prompt in prompts)
        lines = list(difflib.unified_diff(before, after, *models, lineterm=""))
    differs = sorted(name for name in first if name not in ("model", "request_id") and first[name] != second[name])
    return {"messages": body["messages"], "sides": sides, "differs": differs, "rendered_diff": lines}


async def _side(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    side: dict[str, Any] = {"model": body["model"], "rendered": None, "sampling": None, "error": None}
    side |= dict.fromkeys(("engine", "prompt_tokens", "answer", "finish_reason", "usage", "cost_microusd", "wall_ms"))
    rendered = await _try(client, "/v1/chat/completions/render", body)
    if rendered is not None:
        side["rendered"] = rendered.get("prompt", rendered.get("text"))
    estimate = await _try(client, "/v1/estimate", body)
    if estimate is not None:
        side |= {"engine": estimate["engine"]["name"], "prompt_tokens": estimate["prompt_tokens"]}
    side["dropped"] = list((estimate or {}).get("warnings", ()))
    try:
        answer = await client.chat(body)
    except CallFailed as failure:
        return side | {"error": str(failure), "request_id": client.request_id}
    choice, extension = answer["choices"][0], answer["hitsend"]
    side |= {
        "answer": choice["message"],
        "finish_reason": choice["finish_reason"],
        "usage": answer["usage"],
        "cost_microusd": extension["cost_microusd"],
        "request_id": extension["request_id"],
        "dropped": list(extension.get("warnings", ())),
    }
    return side | await _recorded(client, extension["request_id"])


async def _recorded(client: Client, request_id: str) -> dict[str, Any]:
    """From the flight record, where this caller may see it."""
    try:
        record = await client.get(f"/inspect/requests/{request_id}")
    except CallFailed:
        return {}
    nothing: dict[str, Any] = {"sources": {}, "sampling": {}}
    fitted = next((event for event in record["events"] if event["type"] == "fitted"), nothing)
    values = fitted["sampling"]
    sources = {
        name: "its own" if source == "upstream" else f"{values.get(name)} ({source})"
        for name, source in fitted["sources"].items()
    }
    return {"engine": record["engine"], "wall_ms": record["wall_ms"], "sampling": sources}


async def _try(client: Client, path: str, body: dict[str, Any]) -> Any:
    try:
        return await client.post(path, body)
    except CallFailed:
        return None


def show(document: dict[str, Any]) -> None:
    """Two columns. What a model wrote can't drive the terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for side in document["sides"]:
        table.add_column(Text(safe(side["model"])), overflow="fold")
    for name in _SHOWN:
        mark = "≠ " if name in document["differs"] else "  "
        table.add_row(mark + name, *(Text(safe(_cell(side[name]))) for side in document["sides"]))
    table.add_row("  answer", *(Text(safe((side["answer"] or {}).get("content") or "")) for side in document["sides"]))
    Console().print(table)
    for line in document["rendered_diff"] or ():
        print(safe(line))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return "\n".join(f"{name} {_inner(inner)}" for name, inner in value.items())
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _inner(value: Any) -> str:
    """Details, as far as there are any."""
    if not isinstance(value, dict):
        return str(value)
    return ", ".join(f"{name} {one}" for name, one in value.items() if one) or "0"
