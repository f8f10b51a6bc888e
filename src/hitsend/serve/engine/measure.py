"""One way to run a model, measured: how fast it is, or how well it foretells text. A process of its own.

    python -m hitsend.serve.engine.measure JSON

Enters: a `Question` as JSON. Leaves: an `Answer` as JSON on stdout; exit code 1 with the reason on stderr. Always true:
speeds are the best of a few repetitions (what another process took away is not the model's), perplexity is over whole
windows of the held texts, each computed from nothing, all but the first token scored. Next: `tuned.py`.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock, SystemClock
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.blas import with_blas
from hitsend.serve.engine.libllama import die_with_parent, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.offsets import offsets_bytes
from hitsend.serve.engine.shape import CELL_STEP, CellPlan
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch

WINDOW = 512
"""Tokens of a perplexity window."""

WIDTHS = (1, 8, 32)
"""Sequences that decode together."""

_PROMPT, _PREFILL = 128, 256
_STEPS = {1: 16, 8: 6, 32: 3}
_KIB = 1024


class Question(msgspec.Struct, frozen=True):
    """How to run which file. `windows`: measure perplexity on every `windows`-th one; 0: measure speed."""

    path: str
    libllama: str | None
    num_threads: int
    kv_type: str = "f16"
    micro_batch: int = 512
    windows: int = 0
    blas: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """Tokens per second (`decode`: by width; `alone`: of one sequence on one thread, 0 where there is only one), or
    mean negative log-likelihoods by window.

    `peak_bytes`: the most memory that the process had.
    """

    prefill: float = 0.0
    decode: dict[int, float] = {}
    alone: float = 0.0
    losses: tuple[float, ...] = ()
    weights_bytes: int = 0
    peak_bytes: int = 0

    def best_with(self, other: "Answer") -> "Answer":
        """The better speeds of two measurements of the same."""
        return msgspec.structs.replace(
            self,
            prefill=max(self.prefill, other.prefill),
            decode={width: max(speed, other.decode[width]) for width, speed in self.decode.items()},
            alone=max(self.alone, other.alone),
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )

    def times_apart(self, other: "Answer") -> float:
        """How many times as fast the faster one was, in the figure in which that is most."""
        pairs = [(self.prefill, other.prefill)]
        pairs += [(speed, other.decode[width]) for width, speed in self.decode.items()]
        return max(max(pair) / min(pair) for pair in pairs)


def held_texts() -> list[bytes]:
    """The texts, by name."""
    return [file.read_bytes() for file in sorted(Path(__file__).with_name("held").glob("*.txt"))]


def answer(question: Question, clock: Clock) -> Answer:
    """Measure. Raises ConfigError."""
    header = read_header(question.path)
    library = with_blas(open_library(question.libllama), question.blas, header)
    model = LoadedModel(library, question.path)
    slots = 1 if question.windows else max(WIDTHS)
    cells = max(WINDOW, CELL_STEP)
    decoder = LlamaDecoder(
        model,
        CellPlan(slots, cells, cells * slots),
        clock,
        step_tokens=question.micro_batch,
        num_threads=question.num_threads,
        is_unified=False,
        adapters=Adapters(model, header, question.path),
        kv_type=question.kv_type,
    )
    decoder.warm_up()
    if question.windows:
        found = Answer(losses=tuple(_losses(model, decoder, question.windows)))
    else:
        prefill, lengths = _prefill(decoder, clock), _fill(decoder)
        decode = {width: _decode(decoder, clock, width, lengths) for width in WIDTHS}
        found = Answer(prefill, decode, _alone(decoder, clock, lengths) if question.num_threads > 1 else 0.0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    weights = library.llama_model_size(model.handle) + offsets_bytes(question.path, header)
    return msgspec.structs.replace(found, weights_bytes=weights, peak_bytes=peak)


def _losses(model: LoadedModel, decoder: LlamaDecoder, every: int) -> list[float]:
    windows: list[NDArray[np.int32]] = []
    for text in held_texts():
        ids = np.array(model.vocabulary.tokenize(text), np.int32)
        windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW)]
    return [_loss(decoder, window) for window in windows[::every]]


def _loss(decoder: LlamaDecoder, ids: NDArray[np.int32]) -> float:
    """In nats per token."""
    parts = []
    for at in range(0, WINDOW, decoder.max_batch_tokens):
        part = ids[at : at + decoder.max_batch_tokens]
        parts.append(decoder.decode(_batch(part, np.arange(at, at + len(part)), np.zeros(len(part)), last_only=False)))
    decoder.release(0)
    logits = np.concatenate(parts)[:-1]
    top = logits.max(1)
    total = np.log(np.exp(logits - top[:, None]).sum(1, dtype=np.float64)) + top
    return float((total - logits[np.arange(WINDOW - 1), ids[1:]]).mean())


def _prefill(decoder: LlamaDecoder, clock: Clock) -> float:
    count = min(_PREFILL, decoder.max_batch_tokens)
    seconds = []
    for _ in range(3):
        begin = clock.now()
        for at in range(0, _PREFILL, count):
            decoder.decode(_batch(_any_ids(count, decoder), np.arange(at, at + count), np.zeros(count), last_only=True))
        seconds.append(clock.now() - begin)
        decoder.release(0)
    return _PREFILL / min(seconds)


def _fill(decoder: LlamaDecoder) -> NDArray[np.int64]:
    """A prompt in every slot; returns how many tokens each holds."""
    prompt = np.arange(_PROMPT)
    decoder.decode(_batch(_any_ids(_PROMPT, decoder), prompt, np.zeros(_PROMPT), last_only=True))
    for slot in range(1, max(WIDTHS)):
        decoder.copy(0, slot)
    return np.full(max(WIDTHS), _PROMPT)


def _decode(decoder: LlamaDecoder, clock: Clock, width: int, lengths: NDArray[np.int64]) -> float:
    seconds = []
    for _ in range(_STEPS[width]):
        batch = _batch(_any_ids(width, decoder), lengths[:width], np.arange(width), last_only=False)
        begin = clock.now()
        decoder.decode(batch)
        seconds.append(clock.now() - begin)
        lengths[:width] += 1
    return width / min(seconds)


def _alone(decoder: LlamaDecoder, clock: Clock, lengths: NDArray[np.int64]) -> float:
    decoder.use_alone(1)
    return _decode(decoder, clock, 1, lengths)


def _any_ids(count: int, decoder: LlamaDecoder) -> NDArray[np.int32]:
    # speed depends on no value, but repeated rows would stay in the caches
    return (np.arange(count, dtype=np.int64) * 7919 % (decoder.vocab_size // 2) + decoder.vocab_size // 4).astype(
        np.int32
    )


def _batch(ids: NDArray[np.int32], positions: NDArray[Any], slots: NDArray[Any], *, last_only: bool) -> Batch:
    wants = np.ones(len(ids), np.bool_)
    if last_only:
        wants[:-1] = False
    return Batch(ids, positions.astype(np.int32), slots.astype(np.int32), wants)


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    die_with_parent()
    try:
        found = answer(msgspec.json.decode(arguments[0], type=Question), SystemClock())
    except ConfigError as failure:
        print(failure, file=sys.stderr)  # noqa: T201 (its parent reads it)
        return 1
    print(msgspec.json.encode(found).decode())  # noqa: T201 (the answer)
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the library's own destructors may log into a Python that is already gone.
    os._exit(exit_code)
