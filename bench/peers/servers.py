"""The peers as running servers, and which of them can run here.

`python -m bench.peers.servers vllm [PORT] [--thinks]` starts one and keeps it until Ctrl-C, for tests against it.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

from bench.peers.prepare import MODEL, OPENVINO, ROOT, THINKER, VLLM
from bench.serving import SLOTS, bundled_gguf, free_port

START_S = 300
NAME = "bench"
KV_GIB = 2

WORD = "bfloat16" if "avx512_bf16" in pathlib.Path("/proc/cpuinfo").read_text() else "float32"
"""Its best on this processor: without AVX-512 bfloat16 is emulated."""

VLLM_ARGUMENTS = (
    *("--dtype", WORD, "--max-model-len", "2048", "--max-num-seqs", str(SLOTS), "--enforce-eager"),
    "--enable-prefix-caching",
)
"""Compiled graphs are no faster."""

THINKING_ARGUMENTS = (
    "--enable-prompt-tokens-details",
    *("--reasoning-parser", "deepseek_v3", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--reasoning-config", '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'),
)


def vllm_environment(threads: int) -> dict[str, str]:
    """What it is told beside its arguments."""
    own = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    return dict(os.environ) | own


@contextlib.contextmanager
def vllm(threads: int, *more: str, model: pathlib.Path = MODEL, port: int | None = None) -> Iterator[tuple[str, str]]:
    """vLLM's own server. Yields address and model."""
    port = port or free_port()
    words = [str(VLLM / "bin/vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--served-model-name", NAME, *VLLM_ARGUMENTS, *more]
    with started(words, f"http://127.0.0.1:{port}/health", vllm_environment(threads)):
        yield f"http://127.0.0.1:{port}", NAME


@contextlib.contextmanager
def openvino(threads: int) -> Iterator[tuple[str, str]]:
    """OpenVINO GenAI behind a small server of ours, with the GGUF itself. Yields address and model."""
    port = free_port()
    script = pathlib.Path(__file__).with_name("openvino_server.py")
    words = [str(OPENVINO / "bin/python"), str(script), bundled_gguf(), str(port), str(threads), str(SLOTS)]
    with started(words, f"http://127.0.0.1:{port}/v1/models", dict(os.environ)):
        yield f"http://127.0.0.1:{port}", NAME


def there() -> tuple[str, ...]:
    """Of the two, those that `prepare` has installed."""
    found = {"vLLM": VLLM / ".installed", "OpenVINO": OPENVINO / ".installed"}
    return tuple(name for name, file in found.items() if file.exists())


@contextlib.contextmanager
def started(words: Sequence[str], url: str, environment: dict[str, str]) -> Iterator[int]:
    """A process group until the block ends; ready when `url` answers. What it says is kept in `.venv-peers`."""
    log = ROOT / f"{pathlib.Path(words[0]).name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait(url, process, log)
        yield process.pid
    finally:
        _end(process)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: pathlib.Path) -> None:
    for _ in range(START_S * 4):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):  # noqa: S310  # our own loopback server
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    raise SystemExit(f"no answer from {url} ({log.name}):\n{log.read_text()[-3000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """All of its group: vLLM's workers are processes of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main() -> None:
    """Command line."""
    port = next((int(word) for word in sys.argv[2:] if word.isdigit()), 8100)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    more = THINKING_ARGUMENTS if "--thinks" in sys.argv else ()
    with (
        contextlib.suppress(KeyboardInterrupt),
        vllm(os.cpu_count() or 1, *more, model=THINKER if more else MODEL, port=port) as (url, model),
    ):
        print(f"{url} serves {model}; Ctrl-C ends it", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
