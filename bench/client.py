"""Requests for the benches that drive a server in ways of their own: new words each time, answers that can't end early.

What only measures uses `hitsend load`.
"""

import random
from typing import Any

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
