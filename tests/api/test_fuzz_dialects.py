"""The same hostile bodies for the other dialects: never a 5xx, always a valid error of the dialect's own."""

import json
import random
from typing import Any

import pytest

from hitsend.serve.api.messages_request import MessagesBody
from hitsend.serve.api.responses_request import ResponsesBody
from tests.api.test_fuzz import NUMBERS, OTHERS, mutated, with_field
from tests.edge import Edge

pytestmark = pytest.mark.slow  # waits for sockets or processes, or tries very many examples

BASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "/v1/responses": (
        {"model": "m", "input": "hi"},
        {
            "instructions": "é",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": None}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "stream": True,
        },
        ResponsesBody.__struct_fields__,
    ),
    "/v1/messages": (
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
        {
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "é", "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1]}},
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
            ],
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "thinking": {"type": "enabled", "budget_tokens": 3},
            "output_config": {"effort": "low"},
            "stop_sequences": ["x"],
            "stream": True,
        },
        MessagesBody.__struct_fields__,
    ),
}


def bodies(path: str) -> list[bytes]:
    small, rich, fields = BASES[path]
    chance = random.Random(3)
    base = json.dumps(small)
    values = [*NUMBERS, *OTHERS, '[{"type":"x"}]', '{"type":"function"}', '{"type":[]}', '[{"content":[{"type":1}]}]']
    found = [with_field(base, field, value) for field in (*fields, "nonsense") for value in values]
    for name in rich:  # in place of the base's own field too, so that the value is really read
        found += [json.dumps(small | rich | {name: None}).replace(": null", f": {value}").encode() for value in values]
    whole = json.dumps(small | rich).encode()
    return found + [mutated(chance, whole) for _ in range(1500)]


@pytest.mark.parametrize("path", BASES)
async def test_no_body_is_ever_the_server_s_fault(path: str):
    edge = Edge()
    served = refused = 0
    for body in bodies(path):
        answer = await edge.ask(path, body)
        if answer.status == 200:
            served += 1
            continue
        error = answer.error
        assert answer.status in (400, 403, 404), (body, error)
        if answer.status == 404:
            assert b"previous_response_id" in body
        refused += 1
    assert served > 100
    assert refused > 2000
    assert edge.flights.num_open == 0


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/messages/count_tokens"])
async def test_counting_is_as_strict(path: str):
    edge = Edge()
    base = next(base for base in BASES if path.startswith(base))
    statuses = [(await edge.ask(path, body)).status for body in bodies(base)[::5]]
    assert set(statuses) <= {200, 400, 404}
    assert edge.pipeline.requests == []
