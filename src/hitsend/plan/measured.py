"""Measured speeds, as others published them.

Enters: a CSV in the form of InferenceX's collected rows, or JSON with `results`. Leaves: one `Measured` per row. Always
true: a row that isn't an engine's whole answer to one load (prompts and answers on different machines, no latency) is
left out; what the source writes of ranks is read as GPUs: some rows multiply expert by tensor ranks. Next:
`speed_check.py`.
"""

import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.roofline import Layout

MAX_TP = 8
"""Rows of more GPUs in one rank group are racks whose split the source doesn't say."""
_SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300"}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one system, and what came out in milliseconds."""

    id: str
    model: str
    gpu: str
    engine: str
    weights: str
    layout: Layout
    concurrency: int
    input: int
    output: int
    ttft_ms: float | None
    tpot_ms: float
    version: str = ""
    """Of the engine."""

    @property
    def system(self) -> tuple[Any, ...]:
        """What stays the same from one load to the next."""
        return (self.model, self.gpu, self.engine, self.version, self.weights, self.layout)

    @property
    def is_for_fitting(self) -> bool:
        """Half of all loads, by a hash of what was run: the other half judges. What was measured several times is on
        one side."""
        layout = self.layout
        words = (self.model.rsplit("/", 1)[-1], self.gpu, self.engine, self.weights, layout.tp, layout.pp, layout.ep)
        told = (*words, layout.attention_dp, self.concurrency, self.input, self.output)
        return hashlib.sha256(repr(told).encode()).digest()[0] % 2 == 0


def read_measured(path: Path) -> list[Measured]:
    """Raises ConfigError where the file can't be read or holds nothing of the kind."""
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"can't read {path}: {failure}") from None
    if content.lstrip().startswith(("{", "[")):
        try:
            told = msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        rows = told.get("results") if isinstance(told, dict) else told
        found = list(_of_results(rows if isinstance(rows, list) else []))
    else:
        found = list(_of_csv(csv.DictReader(content.splitlines())))
    found = _once(found)
    if not found:
        raise ConfigError(f"{path}: no row in it has a load and its latencies")
    return found


def _once(rows: list[Measured]) -> list[Measured]:
    """Without rows that two collections have of one measurement: the same load with the same latencies."""
    seen: dict[tuple[Any, ...], Measured] = {}
    for row in rows:
        load = (row.model.rsplit("/", 1)[-1], row.gpu, row.engine, row.weights, row.layout, row.concurrency)
        seen.setdefault((*load, row.input, row.output, f"{row.tpot_ms:.6g}"), row)
    return list(seen.values())


def _of_csv(rows: Iterable[Mapping[str, str]]) -> Iterator[Measured]:
    for row in rows:
        if row.get("mode", "agg") != "agg" or not row.get("silicon_tpot_ms"):
            continue
        layout = _layout(row)
        concurrency = _concurrency(row)
        if layout is None or concurrency is None:
            continue
        yield Measured(
            id=row["id"],
            model=row["model_path"],
            gpu=_SYSTEMS.get(row["system"], row["system"].upper()),
            engine=row["backend"],
            weights=_weights(row["model_path"], row["precision"]),
            layout=layout,
            concurrency=concurrency,
            input=int(row["isl"]),
            output=int(row["osl"]),
            ttft_ms=float(row["silicon_ttft_ms"]) if row.get("silicon_ttft_ms") else None,
            tpot_ms=float(row["silicon_tpot_ms"]),
            version=row.get("backend_version") or "",
        )


def _of_results(rows: Iterable[Any]) -> Iterator[Measured]:
    for row in rows:
        tpot = row.get("tpot_ms") or row.get("mean_tpot_ms")
        counts = [row.get(key) for key in ("input_len", "output_len", "concurrency")]
        known = row.get("model") and row.get("gpu") and all(isinstance(count, int) and count > 0 for count in counts)
        if not isinstance(tpot, int | float) or not known or "/" in str(row.get("precision")):
            continue
        yield Measured(
            id=str(row["id"]),
            model=str(row["model"]).split(" (")[0],
            gpu=_SYSTEMS.get(str(row["gpu"]), str(row["gpu"]).upper()),
            engine=str(row.get("engine") or "vllm").split()[0],
            weights=_weights(str(row["model"]), str(row.get("precision") or "")),
            layout=_told_layout(row),
            concurrency=int(row["concurrency"]),
            input=int(row["input_len"]),
            output=int(row["output_len"]),
            ttft_ms=row.get("ttft_ms") or row.get("mean_ttft_ms"),
            tpot_ms=float(tpot),
            version=str(row.get("engine_version") or ""),
        )


def _told_layout(row: Mapping[str, Any]) -> Layout:
    named = _NAMED.search(str(row.get("source_row") or ""))
    gpus = int(named.group(1)) if named else int(row.get("tp") or row.get("n_gpus") or 1)
    experts = named.group(2) if named else str(row.get("ep") or "1")
    return Layout(
        tp=gpus, ep=experts.casefold() not in {"1", "none"}, attention_dp=int(row.get("attention_dp") or 1) > 1
    )


_NAMED = re.compile(r"_tp(\d+)(?:_0)?_ep(\d+|none)")


def _concurrency(row: Mapping[str, str]) -> int | None:
    told = re.search(r"silicon_concurrency=(\d+)", row.get("silicon_data_source") or "")
    told = told or re.search(r"_c(\d+)_", row["id"])
    text = told.group(1) if told else row.get("batch_size")
    return int(text) if text else None


def _layout(row: Mapping[str, str]) -> Layout | None:
    """Some rows write tensor ranks times expert ranks where others write GPUs; an id that names ranks goes first."""
    keys = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, moe_tp, moe_ep = (max(1, int(row.get(key) or 1)) for key in keys)
    named = _NAMED.search(row["id"])
    if named and int(named.group(1)) <= MAX_TP:
        gpus, experts = int(named.group(1)), 1 if named.group(2) == "none" else int(named.group(2))
    elif moe_ep > 1 and moe_tp == moe_ep:
        gpus, experts = moe_ep, moe_ep
    elif dp > 1 and moe_ep == dp * dp:
        gpus, experts = dp, dp
    else:
        gpus, experts = tp * dp, moe_ep
    return Layout(tp=gpus, ep=experts > 1, attention_dp=dp > 1) if gpus <= MAX_TP else None


def _weights(model: str, precision: str) -> str:
    """What a row's precision is called here."""
    low = precision.casefold()
    if "gpt-oss" in model:
        return "mxfp4"
    if not low:
        return "fp8" if "FP8" in model else "bf16"
    return {"fp4": "nvfp4", "int4": "int4-experts" if "Kimi" in model else "int4", "fp16": "bf16"}.get(low, low)
