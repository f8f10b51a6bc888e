"""How much of this machine the model's arithmetic uses: decode against its byte floor, prefill against sgemm.

Usage: python -m bench.utilisation [--threads 2] [--rounds 5] [--cells 200] [--native] [--layout NAME] [--json FILE]
The floor of a decoded token is the time that reading all weights, and the KV cells so far, takes at the bandwidth that
the same number of threads reach reading memory here. The roof of a prefill is the speed of numpy's float32 matrix
product. All of it is measured in turns, so that a busy neighbour slows all; then each operation of one step is timed by
libllama's evaluation callback, which says what the rest of the time went into. With `--threads 1` all is CPU time,
so that the figures hold on a busy machine too, as far as neighbours leave caches and memory alone.
"""

import argparse
import ctypes
import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.serving import NATIVE, bundled_gguf, machine
from hitsend.core.clock import SystemClock
from hitsend.gguf import read_header
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.layouts import AS_SHIPPED, converted
from hitsend.serve.engine.libllama import ContextParams, Library, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.offsets import offsets_bytes
from hitsend.serve.engine.shape import memory_shape, plan_cells
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch
from hitsend.settings import EngineSettings

READ_BYTES = 256 * 1024 * 1024
"""Far more than any cache holds."""

MATRIX = 1024
PREFILL_TOKENS = 512

EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class Watched:
    """A library whose new contexts call back around each operation; `spent` adds up seconds by kind of operation."""

    def __init__(self, library: Library, clock: Callable[[], float]) -> None:
        self._library, self._clock = library, clock
        self._native = ctypes.CDLL(library.path)
        for name in ("ggml_op_desc", "ggml_get_name"):
            function = getattr(self._native, name)
            function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self._callback = EvalCallback(self._around)
        self._begin = 0.0
        self.spent: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def default_context_params(self) -> ContextParams:
        """With the callback in it."""
        params = self._library.default_context_params()
        params.cb_eval = ctypes.cast(self._callback, ctypes.c_void_p).value
        return params

    def _around(self, tensor: int, is_before: bool, _data: int | None) -> bool:  # noqa: FBT001  (the library calls it)
        now = self._clock()
        if not is_before:
            kind, name = self._native.ggml_op_desc(tensor).decode(), self._native.ggml_get_name(tensor).decode()
            self.spent[f"{kind} {name.split('-')[0]}" if kind == "MUL_MAT" else kind] += now - self._begin
        self._begin = self._clock()
        return True


def opened(library: Any, path: str, threads: int, cells: int) -> LlamaDecoder:
    """The bundled model with one sequence's cache."""
    settings = EngineSettings(num_slots=1, context=max(1024, cells + 512))
    plan = plan_cells(memory_shape(read_header(path)), settings)
    model = LoadedModel(library, path)
    adapters = Adapters(model, read_header(path), path)
    return LlamaDecoder(
        model, plan, SystemClock(), step_tokens=512, num_threads=threads, is_unified=False, adapters=adapters
    )


def batch(start: int, count: int) -> Batch:
    """So many tokens of one sequence; the last one wants logits."""
    ids = np.random.default_rng(start).integers(100, 40_000, count).astype(np.int32)
    wants = np.arange(count) == count - 1
    return Batch(ids, np.arange(start, start + count, dtype=np.int32), np.zeros(count, np.int32), wants)


def clock_of(threads: int) -> Callable[[], float]:
    """CPU seconds of the one thread, else the wall's."""
    return time.process_time if threads == 1 else time.perf_counter


def read_memory(parts: list[NDArray[np.uint64]]) -> None:
    """One thread per part, each reads all of it once."""
    threads = [threading.Thread(target=part.max) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(path: str, threads: int, rounds: int, cells: int, libllama: str | None) -> dict[str, float]:
    """Medians over the rounds; in each, memory, matrices, prefill and decode take turns."""
    library, clock = open_library(libllama), clock_of(threads)

    def seconds(work: Callable[[], object]) -> float:
        begin = clock()
        work()
        return clock() - begin

    decoder = opened(library, path, threads, cells)
    parts = np.array_split(np.ones(READ_BYTES // 8, np.uint64), threads)
    left, right = (np.random.default_rng(i).random((MATRIX, MATRIX), np.float32) for i in range(2))
    runs: dict[str, list[float]] = {name: [] for name in ("read_s", "matrix_s", "prefill_s", "decode_s")}
    for _ in range(rounds):
        runs["read_s"].append(min(seconds(lambda: read_memory(parts)) for _ in range(2)))
        runs["matrix_s"].append(min(seconds(lambda: left @ right) for _ in range(3)))
        runs["prefill_s"].append(seconds(lambda: decoder.decode(batch(0, PREFILL_TOKENS))))
        decoder.release(0)
        decoder.decode(batch(0, cells))
        ones = [partial(decoder.decode, batch(cells + at, 1)) for at in range(16)]
        runs["decode_s"].append(median(map(seconds, ones)))
        decoder.release(0)
        print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    decoder.close()
    return {name: median(values) for name, values in runs.items()} | weights(library, path)


def weights(library: Library, path: str) -> dict[str, float]:
    """Bytes, and how many weights a prompt's token is multiplied with: all but the vocabulary's."""
    count = ctypes.CDLL(library.path).llama_model_n_params
    count.restype, count.argtypes = ctypes.c_uint64, [ctypes.c_void_p]
    model, header = LoadedModel(library, path), read_header(path)
    embedding = header.metadata[f"{header.architecture}.embedding_length"]
    return {
        "weights_bytes": float(library.llama_model_size(model.handle) + offsets_bytes(path, header)),
        "multiplied": float(count(model.handle) - embedding * model.vocabulary.num_tokens),
    }


def attributed(path: str, threads: int, cells: int, libllama: str | None) -> dict[str, dict[str, float]]:
    """Shares of the time by operation, of a decoded token and of a prefill. Watching costs some microseconds each."""
    watched = Watched(open_library(libllama), clock_of(threads))
    decoder = opened(watched, path, threads, cells)
    found = {}
    decoder.decode(batch(0, cells))
    for name, start, count in (("decode", cells, 1), ("prefill", 0, PREFILL_TOKENS)):
        if name == "prefill":
            decoder.release(0)
        watched.spent.clear()
        decoder.decode(batch(start, count))
        total = sum(watched.spent.values())
        found[name] = {operation: spent / total for operation, spent in watched.spent.most_common(8)}
    decoder.close()
    return found


def judged(figures: dict[str, float], path: str, cells: int) -> dict[str, float]:
    """What was measured against what the machine could do."""
    header = read_header(path)
    moved = figures["weights_bytes"] + memory_shape(header).kv_bytes_per_cell * cells
    bandwidth = READ_BYTES / figures["read_s"]
    flops = 2 * MATRIX**3 / figures["matrix_s"]
    work = 2 * PREFILL_TOKENS * figures["multiplied"]
    return {
        "read_gb_s": bandwidth / 1e9,
        "decode_ms": 1e3 * figures["decode_s"],
        "decode_floor_ms": 1e3 * moved / bandwidth,
        "decode_utilisation": moved / bandwidth / figures["decode_s"],
        "matrix_gflop_s": flops / 1e9,
        "prefill_tokens_s": PREFILL_TOKENS / figures["prefill_s"],
        "prefill_gflop_s": work / figures["prefill_s"] / 1e9,
        "prefill_utilisation": work / figures["prefill_s"] / flops,
    }


def show(result: dict[str, Any]) -> None:
    """In words."""
    of = result["figures"]
    print(f"{result['machine']}; {result['cells']} cells; medians of {result['rounds']} rounds\n")
    floor = f"{of['decode_floor_ms']:.2f} ms at {of['read_gb_s']:.1f} GB/s"
    print(f"decode   {of['decode_ms']:.2f} ms a token, floor {floor}: {100 * of['decode_utilisation']:.0f} % of it")
    roof = f"of {of['matrix_gflop_s']:.0f} GFLOP/s (sgemm): {100 * of['prefill_utilisation']:.0f} %"
    print(f"prefill  {of['prefill_tokens_s']:.0f} tokens/s, {of['prefill_gflop_s']:.0f} {roof}")
    for name, shares in result["operations"].items():
        print(f"\nwhere a {name} goes:")
        for operation, share in shares.items():
            print(f"  {100 * share:5.1f} %  {operation}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--native", action="store_true", help="with what `make native` compiled")
    parser.add_argument("--layout", default=AS_SHIPPED, help="with the weights in this layout")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    # read by numpy's BLAS when it loads, so in a process of its own
    if os.environ.get("OPENBLAS_NUM_THREADS") != str(asked.threads):
        os.environ["OPENBLAS_NUM_THREADS"] = str(asked.threads)
        os.execv(  # noqa: S606  (itself, without a shell)
            sys.executable,
            [
                sys.executable,
                "-m",
                "bench.utilisation",
                *sys.argv[1:],
            ],
        )
    path, libllama = bundled_gguf(), str(NATIVE / "libllama.so") if asked.native else None
    with tempfile.TemporaryDirectory() as folder:
        if asked.layout != AS_SHIPPED:
            models = pathlib.Path(folder)
            path = str(converted(pathlib.Path(path), models, asked.layout, libllama=libllama, say=lambda _: None))
        result = judge(path, libllama, asked)
    show(result)
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1))


def judge(path: str, libllama: str | None, asked: argparse.Namespace) -> dict[str, Any]:
    """All figures of one file on one library."""
    figures = measure(path, asked.threads, asked.rounds, asked.cells, libllama)
    return {
        "machine": machine(asked.threads),
        "rounds": asked.rounds,
        "cells": asked.cells,
        "figures": judged(figures, path, asked.cells),
        "operations": attributed(path, asked.threads, asked.cells, libllama),
    }


if __name__ == "__main__":
    main()
