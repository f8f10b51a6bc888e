"""The real llama-server, with its own metrics, until standard input closes.

Usage: python llama_server.py GGUF TEMPLATE THREADS; without a template (-) it embeds. Prints its address.
"""

import sys
from pathlib import Path

import xllamacpp

if __name__ == "__main__":
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    if sys.argv[2] == "-":
        params.embedding, params.n_parallel, params.n_ctx = True, 1, 512
    else:
        params.chat_template = Path(sys.argv[2]).read_text()
        params.n_parallel, params.n_ctx, params.kv_unified = 2, 2048, False
        params.default_template_kwargs = {"enable_thinking": "false"}  # its own default is to think
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[3])
    params.use_jinja, params.endpoint_metrics, params.warmup, params.port = True, True, False, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
