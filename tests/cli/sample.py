"""A flight record as the server gives it, small enough to check by hand."""

from typing import Any


def record(**changes: Any) -> dict[str, Any]:
    built: dict[str, Any] = {
        "request_id": "req-1",
        "state": "finished",
        "finish_reason": "stop",
        "error": None,
        "received_at": 1_790_000_000.0,
        "wall_ms": 100.0,
        "segments": [
            {"name": "edge", "ms": 5.0},
            {"name": "render", "ms": 1.0},
            {"name": "tokenize", "ms": 0.0},
            {"name": "wait", "ms": 4.0},
            {"name": "prefill_own", "ms": 30.0},
            {"name": "decode_shared", "ms": 60.0},
        ],
        "events": [
            {"type": "received", "at_ms": 0.0, "method": "POST", "path": "/v1/chat/completions", "client": "127.0.0.1"},
            {"type": "first_token", "at_ms": 40.0, "choice": 0},
            *(
                {
                    "type": "step",
                    "at_ms": at,
                    "started_ms": at - 20.0,
                    "step": 7,
                    "prefill_tokens": 0,
                    "decode_tokens": 1,
                    "batch_prefill_tokens": 0,
                    "batch_decode_tokens": 3,
                    "batch_sequences": 3,
                }
                for at in (60.0, 80.0, 100.0)
            ),
            {"type": "choice_finished", "at_ms": 100.0, "choice": 0, "finish_reason": "stop", "num_tokens": 4},
        ],
        "steps_dropped": 0,
        "usage": {
            "prompt_tokens": 300,
            "completion_tokens": 4,
            "cached_tokens": 20,
            "reasoning_tokens": 0,
            "total_tokens": 304,
        },
        "cost_microusd": 1735,
        "engine": "embedded",
        "model": "smollm2-135m",
        "principal": {"key_id": None, "name": "local"},
        "sampling": {"temperature": 1.0},
        "limits": [{"name": "max_messages", "value": 1, "limit": 1024}],
        "cells": {"before": 0, "held": 364, "after": 0},
        "ledger": {"id": 1, "cost_microusd": 1735},
    }
    return built | changes


def summary(known: dict[str, Any]) -> dict[str, Any]:
    """The line that the list of requests has for a record."""
    return {
        "request_id": known["request_id"],
        "received_at": known["received_at"],
        "state": known["state"],
        "finish_reason": known["finish_reason"],
        "error": known["error"] and known["error"]["code"],
        "model": known["model"],
        "name": "local",
        "wall_ms": known["wall_ms"],
        "usage": {name: known["usage"][name] for name in ("prompt_tokens", "completion_tokens")},
        "cost_microusd": known["cost_microusd"],
    }
