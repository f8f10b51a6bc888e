"""OpenVINO GenAI's continuous batching behind as much of OpenAI's chat API as the load tester needs.

Usage (with the Python that has openvino_genai): python openvino_server.py MODEL PORT THREADS SLOTS
One thread steps the pipeline and hands out what came; a thread per connection writes it as server-sent events. Prompts
are rendered by the model's own template, answers decoded by its own tokenizer. Prefix caching is on.
"""

import importlib
import json
import queue
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "bench"
IDLE_S = 0.002

genai: Any = importlib.import_module("openvino_genai")


class Batcher:
    """The pipeline, stepped by one thread as long as there is something to do."""

    def __init__(self, model: str, threads: int, slots: int) -> None:
        schedule = genai.SchedulerConfig()
        schedule.cache_size = 2  # GiB
        schedule.max_num_seqs = slots
        schedule.max_num_batched_tokens = 512
        schedule.dynamic_split_fuse = True
        schedule.enable_prefix_caching = True
        self._pipe = genai.ContinuousBatchingPipeline(model, schedule, "CPU", {"INFERENCE_NUM_THREADS": threads}, {})
        self.tokenizer = self._pipe.get_tokenizer()
        self._asked: queue.SimpleQueue[tuple[Any, Any, queue.SimpleQueue[list[int] | None]]] = queue.SimpleQueue()
        self._running: list[tuple[Any, queue.SimpleQueue[list[int] | None]]] = []
        self._number = 0
        threading.Thread(target=self._loop, daemon=True).start()

    def add(self, ids: Any, config: Any) -> "queue.SimpleQueue[list[int] | None]":
        """Take one request. Its queue gets token ids as they come, and None at the end."""
        out: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._asked.put((ids, config, out))
        return out

    def _loop(self) -> None:
        while True:
            self._take()
            if not self._pipe.has_non_finished_requests():
                time.sleep(IDLE_S)
                continue
            self._pipe.step()
            self._give()

    def _take(self) -> None:
        while not self._asked.empty():
            ids, config, out = self._asked.get()
            self._running.append((self._pipe.add_request(self._number, ids, config), out))
            self._number += 1

    def _give(self) -> None:
        left = []
        for handle, out in self._running:
            is_over = False
            while handle.can_read():
                for output in handle.read().values():
                    out.put(list(output.generated_ids))
            is_over = handle.get_status() != genai.GenerationStatus.RUNNING
            if is_over:
                out.put(None)
            else:
                left.append((handle, out))
        self._running = left


class Handler(BaseHTTPRequestHandler):
    """One connection. `batcher` is set before the server starts."""

    batcher: Batcher
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the base class's name
        """Its one model."""
        self._json({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 2048}]})

    def do_POST(self) -> None:  # the base class's name
        """Tokens of a text, or an answer."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            if "prompt" not in body:
                self.send_error(400)
                return
            self._json({"tokens": self._ids(body["prompt"]).data[0].tolist()})
            return
        self._answer(body)

    def _ids(self, text: str) -> Any:
        return self.batcher.tokenizer.encode(text, add_special_tokens=False).input_ids

    def _answer(self, body: dict[str, Any]) -> None:
        tokenizer = self.batcher.tokenizer
        ids = self._ids(tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True))
        config = genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        out = self.batcher.add(ids, config)
        if body.get("stream"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
        tokens: list[int] = []
        text = ""
        while (more := out.get()) is not None:
            tokens += more
            new = tokenizer.decode(tokens)
            if body.get("stream") and len(new) > len(text) and not new.endswith("\ufffd"):
                self._event({"choices": [{"index": 0, "delta": {"content": new[len(text) :]}}]})
                text = new
        reason = "length" if len(tokens) >= config.max_new_tokens else "stop"
        num = ids.shape[1]
        usage = {"prompt_tokens": num, "completion_tokens": len(tokens), "total_tokens": num + len(tokens)}
        if body.get("stream"):
            rest = tokenizer.decode(tokens)[len(text) :]
            self._event({"choices": [{"index": 0, "delta": {"content": rest}, "finish_reason": reason}]})
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            self.close_connection = True
        else:
            message = {"role": "assistant", "content": tokenizer.decode(tokens)}
            self._json({"choices": [{"index": 0, "message": message, "finish_reason": reason}], "usage": usage})

    def _event(self, document: dict[str, Any]) -> None:
        head = {"id": "x", "object": "chat.completion.chunk", "created": int(time.time()), "model": MODEL}
        self.wfile.write(f"data: {json.dumps(head | document)}\n\n".encode())

    def _json(self, document: dict[str, Any]) -> None:
        raw = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Many may knock at once."""

    request_queue_size = 256
    daemon_threads = True


def main() -> None:
    """Until killed."""
    model, port, threads, slots = sys.argv[1], *map(int, sys.argv[2:5])
    Handler.batcher = Batcher(model, threads, slots)
    Server(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
