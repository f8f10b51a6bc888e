"""Cloudflare's Workers AI as far as it is documented or was seen, on a real socket: what `MockUpstream` answers with.

Facts: developers.cloudflare.com/workers-ai, pages errors, pricing and limits as of 2026-09-17; oddities of streams as
clients have reported them (a number as content, several stops, two [DONE], `response` frames, calls in an older form).
"""

from tests.mock_upstream import Call

ACCOUNT = "/client/v4/accounts/acc/ai"
KEY = "cf-token"
MODELS = ("@cf/qwen/qwen3.8-27b", "@cf/meta/llama-3.2-1b-instruct", "@cf/zai-org/glm-5.3")

# code: (HTTP status, what is said, ours, whether it may be asked once more)
CODES = {
    3036: (429, "daily allowance of 10,000 neurons used", "insufficient_quota", False),
    3040: (429, "no more data centers to forward the request to", "server_overloaded", True),
    3021: (429, "requests per minute", "rate_limit_exceeded", False),
    3006: (413, "request too large", "request_too_large", False),
    3007: (408, "timeout", "engine_timeout", False),
    3008: (408, "aborted", "engine_timeout", False),
    3046: (408, "request timeout", "engine_timeout", False),
    5007: (400, "no such model", "model_not_found", False),
    3042: (404, "model not found", "model_not_found", False),
    5004: (400, "invalid data", "invalid_request", False),
    3003: (400, "incomplete request", "invalid_request", False),
    3039: (400, "invalid data", "invalid_request", False),
    5005: (405, "method not allowed", "invalid_request", False),
    5019: (405, "deprecated SDK", "invalid_request", False),
    5016: (403, "licence not accepted", "permission_denied", False),
    5018: (403, "account not allowed", "permission_denied", False),
    3041: (403, "private model", "permission_denied", False),
    3023: (403, "account blocked", "permission_denied", False),
    5035: (403, "needs a paid plan", "permission_denied", False),
    10000: (401, "authentication error", "engine_unavailable", False),
    7009: (500, "upstream unavailable", "engine_unavailable", True),
}
USAGE = {"prompt_tokens": 1000, "completion_tokens": 500, "total_tokens": 1500}


def envelope(code, message):
    return {"result": None, "success": False, "errors": [{"code": code, "message": message}], "messages": []}


class Emulator:
    """`fails` is a code that the next answers have; `form` is how a stream looks."""

    def __init__(self):
        self.fails = None
        self.form = "openai"
        self.usage = USAGE
        self.calls = []

    async def __call__(self, call: Call):
        verb, path, _ = call.head.split(" ", 2)
        self.calls.append((path, call.body))
        if call.headers().get("authorization") != f"Bearer {KEY}":
            await call.answer("401 No", envelope(10000, "Authentication error"))
        elif verb == "GET" and path.startswith(f"{ACCOUNT}/models/search"):
            await call.answer("200 OK", {"result": [{"id": "x", "name": one} for one in MODELS], "success": True})
        elif self.fails is not None:
            status, message, *_ = CODES[self.fails]
            await call.answer(f"{status} No", envelope(self.fails, message))
        elif path == f"{ACCOUNT}/v1/chat/completions" or path.startswith(f"{ACCOUNT}/run/@cf/"):
            await getattr(self, self.form)(call)
        else:
            await call.answer("404 No", envelope(7000, "no route"))

    async def openai(self, call):
        """As newer models do: the finish reason comes with the usage only."""
        await call.start()
        await call.say("Hel", "lo", "!")
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": self.usage})
        await call.event("[DONE]")

    async def odd(self, call):
        """A number as content, two stops, two [DONE]."""
        await call.start()
        await call.say("1")
        await call.raw(b'data: {"choices":[{"index":0,"delta":{"content":2}}]}\n\n')
        await call.raw(b'data: {"choices":[{"index":0,"delta":{"content":3.10}}]}\n\n')
        for _ in range(3):
            await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await call.event({"choices": [], "usage": self.usage})
        await call.event("[DONE]")
        await call.event("[DONE]")

    async def legacy(self, call):
        """`response` frames: no finish reason at all."""
        await call.start()
        for word in ("Hel", "lo", 7):
            await call.event({"response": word, "p": "abcdef"})
        await call.event({"response": "", "usage": self.usage})
        await call.event("[DONE]")

    async def legacy_cut(self, call):
        """The same, broken off."""
        await call.start()
        await call.event({"response": "Hel"})

    async def tools(self, call):
        """A call in the older form, and `stop` for a reason."""
        await call.start()
        tool = {"name": "look", "arguments": {"at": "it"}}
        await call.event({"response": None, "tool_calls": [tool]})
        await call.event({"response": "", "usage": self.usage})
        await call.event("[DONE]")

    async def tools_stop(self, call):
        """OpenAI's form, with the wrong reason."""
        await call.start()
        tool = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"it"}'}}
        await call.event({"choices": [{"index": 0, "delta": {"content": None, "tool_calls": [tool]}}]})
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": self.usage})
        await call.event("[DONE]")

    async def whole(self, call):
        """No stream although one was asked for, in the native envelope."""
        result = {"response": "Hello7", "usage": self.usage}
        await call.answer("200 OK", {"result": result, "success": True, "errors": [], "messages": []})

    async def failed_whole(self, call):
        """A failure with a status that says otherwise."""
        await call.answer("200 OK", envelope(3040, "no capacity"))

    async def reasoning(self, call):
        """Thoughts, apart from the text."""
        await call.start()
        await call.event({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
        await self.openai_end(call)

    async def openai_end(self, call):
        await call.say("Hello!")
        await call.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": self.usage})
        await call.event("[DONE]")

    async def hangs(self, call):
        """Two words, and then nothing."""
        await call.start()
        await call.say("one", "two")
        await call.has_left.wait()
