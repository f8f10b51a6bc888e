"""Plans beside what engines really logged: `hitsend plan check-logs FILE`.

Enters: a JSON file of log records. Leaves: one `Compared` per number that a record holds. Always true: the planner gets
only what an operator would type (model, GPU, formats, lengths, and where the log prints it the bytes that were free),
never the answer; a record that can't be planned is a row with the reason; a miss is explained or stays a miss. Next:
`explain.py`.

    bytes      KV bytes per token or state, from the printed sizes
    pool       tokens or concurrency, given the bytes that the log says were free
    solved     no bytes were printed: one whole number of blocks must reproduce every printed number
    gpu        tokens or concurrency from the GPU and its utilisation alone
    none       nothing that could be compared was printed
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Facts, Gpu
from hitsend.plan.formats import KV_BYTES
from hitsend.plan.hardware import find_gpu
from hitsend.plan.log_engines import Reading, llama_rows, sglang_rows, vllm_rows
from hitsend.plan.memory import MemoryQuestion
from hitsend.plan.models import find_checkpoint
from hitsend.plan.sizes import Ranks

_WITHIN = {"bytes": 0.01, "pool": 0.01, "solved": 0.01, "gpu": 0.10}
_ROWS = {"vllm": vllm_rows, "sglang": sglang_rows, "llama.cpp": llama_rows}


class Compared(msgspec.Struct, frozen=True):
    """One number of one log. `error`: planned / logged - 1; None where nothing could be planned."""

    id: str
    engine: str
    test: str
    quantity: str
    logged: float | None
    planned: float | None
    error: float | None
    ok: bool
    why: str = ""


class Score(msgspec.Struct, frozen=True):
    """How many of one test's rows came out."""

    test: str
    within: float
    rows: int
    ok: int


def read_logs(path: Path) -> list[dict[str, Any]]:
    """The records of a file: a list, or an object with `logs`. Raises ConfigError."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    logs = content.get("logs") if isinstance(content, dict) else content
    if not isinstance(logs, list) or not all(isinstance(log, dict) and "engine" in log for log in logs):
        raise ConfigError(f"{path}: it must hold a list of logs, each with an engine")
    if not logs:
        raise ConfigError(f"{path}: there is no log in it")
    return logs


def compare_logs(logs: list[dict[str, Any]], facts: Facts) -> list[Compared]:
    """Every number of every log."""
    return [row for log in logs for row in _compare(log, facts)]


def scores(rows: list[Compared]) -> list[Score]:
    """By test. Rows without a planned number count as missed."""
    return [
        Score(test, _WITHIN[test], len(found), sum(row.ok for row in found))
        for test in _WITHIN
        if (found := [row for row in rows if row.test == test])
    ]


def _compare(log: dict[str, Any], facts: Facts) -> Iterator[Compared]:
    name, engine = str(log.get("id", "?")), str(log["engine"])
    why = str(log.get("why") or "")
    try:
        question = question_of(log, facts)
        readings = list(_rows_of(engine)(question, log.get("reported") or {}, _gpu_of(log, facts)))
    except ConfigError as refused:
        test = "pool" if engine == "vllm" else "bytes"
        yield Compared(name, engine, test, "refused", None, None, None, ok=False, why=why or str(refused))
        return
    if not readings:
        reason = why or "no number that can be planned"
        yield Compared(name, engine, "none", "nothing to compare", None, None, None, ok=False, why=reason)
    for reading in readings:
        yield _judged(name, engine, reading, why)


def _rows_of(engine: str) -> Callable[[MemoryQuestion, Mapping[str, Any], Gpu | None], Iterator[Reading]]:
    make = _ROWS.get(engine)
    if make is None:
        raise ConfigError(f"engine {engine!r}: logs of {', '.join(_ROWS)} can be compared")
    return make


def _judged(name: str, engine: str, reading: Reading, why: str) -> Compared:
    error = reading.planned / reading.logged - 1 if reading.logged else math.inf
    near = abs(reading.planned - reading.logged) <= reading.rounding
    ok = near or abs(error) <= _WITHIN[reading.test]
    reason = reading.note if ok else why or reading.note or "not explained"
    return Compared(
        name, engine, reading.test, reading.quantity, reading.logged, reading.planned, error, ok=ok, why=reason
    )


def question_of(log: dict[str, Any], facts: Facts) -> MemoryQuestion:
    """What an operator would have asked. Raises ConfigError where the model isn't known."""
    told = log.get("planner") or {}
    text = " ".join(str(log.get(key) or "") for key in ("model", "arch", "id", "quantisation"))
    checkpoint = _model_of(str(told.get("model") or log.get("model") or ""), facts)
    if told.get("is_uncompressed_mla") or "UNcompressed" in text:
        checkpoint = msgspec.structs.replace(checkpoint, is_uncompressed_mla=True)
    return MemoryQuestion(
        checkpoint=checkpoint,
        engine=str(log["engine"]),
        engine_version=log.get("version"),
        ranks=Ranks(int(log.get("tp") or 1), int(log.get("pp") or 1), int(log.get("dcp") or 1)),
        weights=told.get("weights") or checkpoint.weights or _weights_of(text),
        kv_dtype=_kv_dtype(str(told.get("kv_dtype") or log.get("kv_dtype") or "auto")),
        max_model_len=log.get("max_model_len") or checkpoint.context or 4096,
        gpu_memory_utilization=log.get("gpu_memory_utilization"),
        prefix_caching=bool(log.get("prefix_caching")),
        drafts=int(told.get("mtp", _drafts(text))),
        max_num_seqs=log.get("max_num_seqs"),
        max_num_batched_tokens=told.get("max_num_batched_tokens") or log.get("max_num_batched_tokens"),
    )


def _model_of(text: str, facts: Facts) -> Any:
    """Names in logs come with remarks: tried are the whole, what stands before a remark, and what stands in it."""
    text = re.sub(r"\bclass\b", " ", text)
    outside = re.sub(r"\(.*?\)", " ", text).strip()
    inside = " ".join(re.findall(r"\((.*?)\)", text))
    tries = [
        text,
        outside,
        outside.split(",")[0].strip(),
        *re.split(r"[\s/]+", outside),
        inside,
        *re.split(r"[\s/]+", inside),
    ]
    for name in tries:
        # a bare word such as "model" or a number names nothing
        if len(name) < 6 or not re.search(r"\d|\w[-/]\w", name):
            continue
        try:
            return find_checkpoint(name.strip(",;:"), facts)
        except ConfigError:
            continue
    raise ConfigError(f"the model {text!r} isn't known")


def _weights_of(text: str) -> str | None:
    low = text.casefold()
    marks = (("nvfp4", "nvfp4"), ("modelopt_fp4", "nvfp4"), ("int4", "int4"), ("awq", "int4"), ("w8a8", "int8"))
    if "qat" in low or "mxfp4" in low:
        return None
    return next((weights for mark, weights in marks if mark in low), "fp8" if re.search(r"\bfp8\b", low) else None)


def _kv_dtype(text: str) -> str:
    word = text.casefold().split()[0]
    return word if word in KV_BYTES else "auto"


def _drafts(text: str) -> int:
    found = re.search(r"mtp[\s_-]*(?:n\s*=\s*)?(\d)\b", text, re.IGNORECASE)
    return int(found.group(1)) if found else 0


def _gpu_of(log: dict[str, Any], facts: Facts) -> Gpu | None:
    text = re.sub(r"^\d+x\s+", "", str(log.get("gpu") or ""))
    for name in (text, text.split("(")[0].strip(), " ".join(text.split()[:2])):
        try:
            return find_gpu(name, facts)
        except ConfigError:
            continue
    return None
