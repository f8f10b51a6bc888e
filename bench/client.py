"""A closed-loop client: so many requests in flight at once, each a fresh prompt, timed on this side of the socket.

Usage: python -m bench.client URL MODEL CONCURRENCY REQUESTS PROMPT_TOKENS OUTPUT_TOKENS SEED
Prints one JSON document: wall seconds, output tokens, and per request TTFT and TPOT in ms.
"""

import asyncio
import json
import random
import sys
import time
from typing import Any

import aiohttp

WORDS = ("river", "stone", "cloud", "market", "garden", "letter", "engine", "window", "forest", "copper", "silver")


def prompt(rng: random.Random, num_words: int) -> str:
    """Words that differ from request to request from the first one on, so that no prefix cache helps."""
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def body(model: str, text: str, output_tokens: int) -> dict[str, Any]:
    """One chat request that can't end early: the end tokens are forbidden by logit bias.

    The words begin in a system message: without one the template puts its own in front, the same for every request,
    and a server with a prefix cache would compute less than 128 tokens.
    """
    system, _, user = text.partition(" ")
    return {
        "model": model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "max_tokens": output_tokens,
        "temperature": 0,
        "logit_bias": {"2": -100, "0": -100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def one(session: aiohttp.ClientSession, url: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one request and time its tokens."""
    sent = time.perf_counter()
    first = last = None
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/chat/completions", json=payload) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if any(choice.get("delta", {}).get("content") for choice in chunk.get("choices", ())):
                last = time.perf_counter()
                first = first or last
    if first is None or last is None:
        raise RuntimeError("an answer without text")
    tokens = usage["completion_tokens"]
    tpot = (last - first) / (tokens - 1) * 1000 if tokens > 1 else None
    return {"ttft_ms": (first - sent) * 1000, "tpot_ms": tpot, "output": tokens, "prompt": usage["prompt_tokens"]}


async def fit_words(session: aiohttp.ClientSession, url: str, model: str, prompt_tokens: int) -> int:
    """How many words give that many prompt tokens, template included (every word here is one token)."""
    rng = random.Random(0)
    answer = await one(session, url, body(model, prompt(rng, 10), 2))
    return int(prompt_tokens - (answer["prompt"] - 10))


async def closed_loop(url: str, model: str, argv: list[int]) -> dict[str, Any]:
    """Keep `concurrency` requests in flight until `requests` are done."""
    concurrency, requests, prompt_tokens, output_tokens, seed = argv
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        num_words = await fit_words(session, url, model, prompt_tokens)
        rng = random.Random(seed)
        payloads = [body(model, prompt(rng, num_words), output_tokens) for _ in range(requests)]
        queue = iter(payloads)
        results: list[dict[str, Any]] = []

        async def worker() -> None:
            for payload in queue:  # shared: each worker takes the next one
                answer = await one(session, url, payload)
                results.append(answer)

        started = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(concurrency)))
        wall = time.perf_counter() - started
    return {"wall_s": wall, "output_tokens": sum(r["output"] for r in results), "requests": results}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(closed_loop(sys.argv[1], sys.argv[2], [int(a) for a in sys.argv[3:8]]))))
