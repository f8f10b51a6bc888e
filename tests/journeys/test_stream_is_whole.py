"""Seeded prompts, each once streamed and once whole: the answers are the same, every stream keeps to the grammar.

One real server with the bundled model under a template that can open thoughts, several requests at once. Only ids,
instants and the way of a call's text (dictionary or string) may differ.
"""

import http.client
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from hitsend.testing import check_messages_stream, check_responses_stream, check_stream
from tests.served import IS_DRILL, Served, serving
from tests.stream.completion_grammar import check_completion_stream

pytestmark = [pytest.mark.model, pytest.mark.slow]

SEED = 20_261_129
COUNTS = (110, 40, 26, 24) if IS_DRILL else (50, 14, 12, 12)
"""Of chats, completions, responses and messages: with either, every kind of each is there."""

AT_ONCE = 8
# The examples make the small model close the thoughts that the template opened.
TEMPLATE = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor -%}
{% if enable_thinking is defined and enable_thinking -%}
<|im_start|>assistant
<think>short</think>Yes.<|im_end|>
<|im_start|>assistant
<think>short</think>Yes.<|im_end|>
{% endif -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>{% else %}<think></think>{% endif %}"""

WORDS = ["sea", "moon", "北京", "tea", "🙂", "winter", "robot", "naïve", "bread", "river", "Straße", "glass"]
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ONE_CHOICE: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["°C", "°F"]}},
    "required": ["unit"],
    "additionalProperties": False,
}
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "北"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}


class Case(NamedTuple):
    """One request. `read` makes of (body, answer's bytes, whether streamed) what has to be the same."""

    path: str
    body: dict[str, Any]
    read: Callable[[dict[str, Any], bytes, bool], Any]


def extension(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("cost_microusd", "warnings", "matched_stops")}


def frames(data: bytes) -> list[dict[str, Any]]:
    lines = [frame[6:] for frame in data.split(b"\n\n") if frame.startswith(b"data: {")]
    return [json.loads(line) for line in lines]


def read_chat(body: dict[str, Any], data: bytes, is_stream: bool) -> Any:
    n, logprobs = body.get("n", 1), {}
    if not is_stream:
        whole = json.loads(data)
        found = {}
        for choice in whole["choices"]:
            message = choice["message"]
            assert message.get("reasoning") == message.get("reasoning_content")
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
            found[choice["index"]] = (
                *(message["content"] or "", message.get("reasoning") or "", calls, choice["finish_reason"]),
                (choice["logprobs"] or {"content": []})["content"],
            )
        return found, whole["usage"], extension(whole["hitsend"])
    seen = check_stream(data, n=n, include_usage=True)
    assert seen.is_done, seen
    for chunk in frames(data):
        for choice in chunk["choices"]:
            logprobs.setdefault(choice["index"], []).extend((choice["logprobs"] or {"content": []})["content"])
    found = {}
    for index in range(n):
        calls = [(name, arguments) for _, name, arguments in seen.tool_calls.get(index, ())]
        found[index] = (
            *(seen.texts[index], seen.reasoning.get(index, ""), calls, seen.finish_reasons[index]),
            logprobs[index],
        )
    return found, seen.usage, extension(seen.hitsend or {})


def read_completion(body: dict[str, Any], data: bytes, is_stream: bool) -> Any:
    n = body.get("n", 1)
    if not is_stream:
        whole = json.loads(data)
        found = {c["index"]: (c["text"], c["finish_reason"], c["logprobs"]) for c in whole["choices"]}
        return found, whole["usage"], extension(whole["hitsend"])
    seen = check_completion_stream(data, n=n, include_usage=True)
    assert seen.is_done, seen
    logprobs: dict[int, Any] = dict.fromkeys(range(n))
    for chunk in frames(data):
        for choice in chunk["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                logprobs[choice["index"]] = logprobs[choice["index"]] or {}
                logprobs[choice["index"]].setdefault(name, []).extend(values)
    found = {index: (seen.texts[index], seen.finish_reasons[index], logprobs[index]) for index in range(n)}
    return found, seen.usage, extension(seen.hitsend or {})


def read_response(body: dict[str, Any], data: bytes, is_stream: bool) -> Any:
    whole = check_responses_stream(data).last if is_stream else json.loads(data)
    assert whole["status"] in ("completed", "incomplete"), whole
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in whole["output"]]
    return items, whole["status"], whole["incomplete_details"], whole["usage"], extension(whole["hitsend"])


def read_message(body: dict[str, Any], data: bytes, is_stream: bool) -> Any:
    seen = check_messages_stream(data) if is_stream else None
    assert seen is None or seen.error is None, seen
    whole = json.loads(data) if seen is None else seen.last
    blocks = []
    for block in whole["content"]:
        shown = {k: v for k, v in block.items() if k not in ("id", "partial_json", "signature")}
        if "partial_json" in block:
            shown["input"] = json.loads(block["partial_json"])
        blocks.append(shown)
    return blocks, whole["stop_reason"], whole["stop_sequence"], whole["usage"], extension(whole["hitsend"])


def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def text(chance: random.Random) -> str:
    return f"Say {' '.join(chance.choices(WORDS, k=chance.randint(1, 5)))}, please."


def sampling(chance: random.Random) -> dict[str, Any]:
    return {"temperature": chance.choice([0, 0.7, 1.0, 1.4]), "seed": chance.randrange(2**40)}


def chat_case(chance: random.Random, number: int) -> Case:
    body = {"messages": [{"role": "user", "content": text(chance)}], "max_tokens": chance.randint(5, 8)}
    body |= sampling(chance) | NO_THOUGHTS
    if number % 20 == 0:
        tools = [chance.choice([tool("now", NO_ARGUMENTS), tool("warmth", ONE_CHOICE)])]
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        body |= {"tools": tools, "tool_choice": chance.choice(["required", named]), "max_tokens": 32}
        body |= {"parallel_tool_calls": False, "n": chance.choice([1, 2])}
    elif number % 10 == 1:
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
        body |= {"response_format": schema, "max_tokens": 24}
    elif number % 10 in (2, 3):
        body |= {"chat_template_kwargs": {"enable_thinking": True}, "max_tokens": 12, "n": number % 10 - 1}
    elif number % 10 == 4:
        body |= {"logprobs": True, "top_logprobs": chance.choice([0, 2, 5])}
    elif number % 10 == 5:
        body |= {"n": 2, "logprobs": chance.random() < 0.5}
    elif number % 10 == 6:
        body |= {"stop": [chance.choice([" ", "e", "the", "\n", "!"])]}
    elif number % 10 == 7:
        body |= {"structured_outputs": {"choice": ["yes", "no", "vielleicht 🙂"]}, "n": 2}
    return Case("/v1/chat/completions", body, read_chat)


def completion_case(chance: random.Random, number: int) -> Case:
    body = {"prompt": text(chance), "max_tokens": chance.randint(5, 8)} | sampling(chance)
    if number % 4 == 0:
        body |= {"logprobs": chance.choice([0, 3])}
    elif number % 4 == 1:
        body |= {"n": 2, "echo": True}
    elif number % 4 == 2:
        body |= {"stop": ["\n", "a"]}
    return Case("/v1/completions", body, read_completion)


def response_case(chance: random.Random, number: int) -> Case:
    body = {"input": text(chance), "max_output_tokens": 8, "store": False} | sampling(chance) | NO_THOUGHTS
    if number % 6 == 0:
        tools = [{"type": "function", "name": "now", "parameters": NO_ARGUMENTS, "strict": True}]
        body |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 32}
    elif number % 4 == 1:
        body |= {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}, "max_output_tokens": 24}
    elif number % 4 == 2:
        body |= {"chat_template_kwargs": {"enable_thinking": True}}
    return Case("/v1/responses", body, read_response)


def message_case(chance: random.Random, number: int) -> Case:
    """This dialect knows no seed: greedy."""
    said = [{"role": "user", "content": text(chance)}]
    body: dict[str, Any] = {"messages": said, "max_tokens": 8, "temperature": 0}
    body["thinking"] = {"type": "disabled"}
    if number % 6 == 0:
        tools = [{"name": "now", "input_schema": NO_ARGUMENTS}]
        choice = {"type": "any", "disable_parallel_tool_use": True}
        body |= {"tools": tools, "tool_choice": choice, "max_tokens": 32}
    elif number % 3 == 1:
        body |= {"stop_sequences": ["e", "\n"]}
    return Case("/v1/messages", body, read_message)


def cases() -> list[Case]:
    chance = random.Random(SEED)
    makers = (chat_case, completion_case, response_case, message_case)
    found = [make(chance, number) for make, count in zip(makers, COUNTS, strict=True) for number in range(count)]
    chance.shuffle(found)
    return found


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(TEMPLATE)
    sizes = ("--set", "engine.num_slots=8", "--set", "engine.context=512", "--set", "engine.check_every_step=true")
    # the second time a prompt comes, its bill would truly be another one
    sizes += ("--set", "engine.prefix_cache_bytes=0")
    with serving(*sizes, "--set", f"chat.template={path}") as running:
        yield running


def post(served: Served, path: str, body: dict[str, Any], *, cut_after: int | None = None) -> tuple[int, bytes]:
    """Status and bytes; with `cut_after`, at least so many bytes are read and the connection is closed."""
    address = urlsplit(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if cut_after is None:
            return answer.status, answer.read()
        data = b""
        while len(data) < cut_after and (piece := answer.read1(256)):
            data += piece
        return answer.status, data
    finally:
        connection.close()


def streamed(case: Case) -> dict[str, Any]:
    asks_usage = case.path in ("/v1/chat/completions", "/v1/completions")
    return case.body | {"stream": True} | ({"stream_options": {"include_usage": True}} if asks_usage else {})


def test_streamed_and_whole_say_the_same(thinking: Served) -> None:
    def both(case: Case) -> tuple[Any, Any]:
        found = []
        for is_stream in (True, False):
            status, data = post(thinking, case.path, streamed(case) if is_stream else case.body)
            assert status == 200, (case, data)
            found.append(case.read(case.body, data, is_stream))
        return found[0], found[1]

    every = cases()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        pairs = list(pool.map(both, every))
    assert len(every) == sum(COUNTS)
    for case, (stream, whole) in zip(every, pairs, strict=True):
        assert stream == whole, case
    state = thinking.wait_idle()
    assert (state["cells_used"], state["holds_open"], state["engine"]["check"]) == (0, 0, None)
    _covers(every, [whole for _, whole in pairs])


def _covers(every: list[Case], found: list[Any]) -> None:
    """What was to be compared was really there."""

    def told(read: Any) -> list[Any]:
        return [whole[0] for case, whole in zip(every, found, strict=True) if case.read is read]

    chats = [choice for choices in told(read_chat) for choice in choices.values()]
    assert {reason for *_, reason, _ in chats} == {"stop", "length", "tool_calls"}
    assert any(thoughts and content for content, thoughts, *_ in chats), "nobody thought and answered"
    assert any(calls for _, _, calls, *_ in chats)
    assert any(logprobs and logprobs[0]["top_logprobs"] for *_, logprobs in chats)
    assert {item["type"] for items in told(read_response) for item in items} == {
        "message",
        "function_call",
        "reasoning",
    }
    assert {block["type"] for blocks in told(read_message) for block in blocks} == {"text", "tool_use"}


CHECKS: dict[str, Callable[..., Any]] = {
    "/v1/chat/completions": check_stream,
    "/v1/completions": check_completion_stream,
    "/v1/responses": check_responses_stream,
    "/v1/messages": check_messages_stream,
}


@pytest.mark.parametrize("path", CHECKS)
def test_a_stream_that_its_client_leaves_kept_to_the_grammar_until_then(thinking: Served, path: str) -> None:
    said = {"prompt": "Count."} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Count."}]}
    said |= {"max_tokens": 200}
    if path == "/v1/responses":
        said = {"input": "Count.", "max_output_tokens": 200}
    for cut_after in (1, 900, 2500):
        status, data = post(thinking, path, said | {"stream": True, "temperature": 0}, cut_after=cut_after)
        assert status == 200
        CHECKS[path](data, is_cut=True)
    state = thinking.wait_idle()
    assert (state["running"], state["cells_used"], state["holds_open"]) == (0, 0, 0)
