"""The embedding child: a process of its own with one embedding model.

    python -m hitsend.serve.engine.embedding_worker --fd N

Enters: `OpenEmbedder`, then orders. Leaves: one answer to each, in order. Always true: the model file is parsed here,
nowhere near the edge; one order is done at a time; the process ends with the edge, dumps no core and leaves Ctrl-C and
SIGTERM to the edge. Next: `llama_embedder.py`.
"""

import os
import resource
import signal
import sys

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError, EngineFailed
from hitsend.gguf import read_header
from hitsend.serve.engine.embedding_messages import (
    Answer,
    EmbedBatch,
    EmbedderFacts,
    EmbedderRefused,
    OpenEmbedder,
    SplitTexts,
    TextIds,
    Vectors,
    encode,
    order_decoder,
)
from hitsend.serve.engine.libllama import die_with_parent, open_library
from hitsend.serve.engine.llama_embedder import BATCH_INPUTS, LlamaEmbedder
from hitsend.serve.engine.loading import num_cores
from hitsend.serve.engine.offsets import check_whole
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.parent import ParentLine


class EmbeddingWorker:
    """The loaded model. Raises ConfigError for a file that can't be used."""

    def __init__(self, order: OpenEmbedder) -> None:
        header = read_header(order.model_path)
        check_whole(order.model_path, header, "engine.embedding_model")
        library = open_library(order.libllama)
        self._model = LoadedModel(library, order.model_path)
        threads = order.num_threads or num_cores()
        self._embedder = LlamaEmbedder(self._model, context=order.context, num_threads=threads)
        self._clock = SystemClock()
        self.facts = EmbedderFacts(
            architecture=header.architecture,
            library=library.name,
            vocab_size=self._model.vocabulary.num_tokens,
            dimensions=self._embedder.dimensions,
            max_tokens=self._embedder.max_tokens,
            max_batch_tokens=self._embedder.max_batch_tokens,
            max_batch_inputs=BATCH_INPUTS,
        )

    def answer(self, order: SplitTexts | EmbedBatch) -> Answer:
        """Do one order."""
        if isinstance(order, SplitTexts):
            split = self._model.vocabulary.tokenize
            return TextIds(tuple(tuple(split(text.encode(), add_special=True)) for text in order.texts))
        started_at = self._clock.now()
        try:
            rows = self._embedder.embed(order.inputs, order.dimensions)
        except EngineFailed as failure:
            return EmbedderRefused(failure.message)
        return Vectors(rows.tobytes(), started_at, self._clock.now())


def serve(line: ParentLine) -> int:
    """Answer orders until the edge is gone. Returns the exit status."""
    worker: EmbeddingWorker | None = None
    while not line.is_closed:
        for body in line.receive(timeout_s=60.0):
            order = order_decoder.decode(body)
            if not isinstance(order, OpenEmbedder):
                assert worker is not None
                line.send(encode(worker.answer(order)))
                continue
            try:
                worker = EmbeddingWorker(order)
            except ConfigError as failure:
                message = str(failure).replace("engine.model:", "engine.embedding_model:")
                line.send(encode(EmbedderRefused(message)))
                line.drain(2.0)
                return 1
            line.send(encode(worker.facts))
    return 0


def main(arguments: list[str]) -> int:
    """Run until the edge is gone."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    return serve(ParentLine(int(arguments[arguments.index("--fd") + 1])))


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: the library's own destructors may log into a Python that is already gone.
    os._exit(exit_code)
