"""What `vllm serve MODEL --host H --port P …` looks like from outside, without a model: for tests of who starts it."""

import http.server
import json
import os
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        text = f"{os.getpid()} {sys.argv[2]}"
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}], "usage": usage}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        """Says nothing."""


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
