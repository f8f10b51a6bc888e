"""Run llama-server (the one inside the xllamacpp package) until standard input closes.

Usage: python -m bench.llama_server GGUF PARALLEL CONTEXT_PER_SLOT THREADS
Prints its address on standard output when it is ready.
"""

import sys

import xllamacpp


def main() -> None:
    """Start it with the same weights, threads, slots and context per slot as hitsend."""
    gguf, parallel, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_parallel = parallel
    params.n_ctx = parallel * context
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.kv_unified = False
    params.port = 0
    params.warmup = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
