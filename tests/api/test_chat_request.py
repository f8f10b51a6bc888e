import json
from typing import Any

import pytest

from hitsend.core.errors import InvalidRequest
from hitsend.core.events import Parsed
from hitsend.core.request import Principal, Request
from hitsend.serve.api import chat_request
from hitsend.settings import AccessSettings
from tests.edge import Edge, chat_body

USER = {"role": "user", "content": "t?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "t", "arguments": "{}"}}
TOOL = '{"type":"function","function":{"name":"t","description":"d"}}'
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def parse(body: Any, **limits: int) -> tuple[Request, Parsed]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return chat_request.parse(
        raw, AccessSettings(**limits), request_id="r", principal=Principal(), default_model="only"
    )


def refusal(body: Any, **limits: int) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body, **limits)
    return caught.value


def raw(field: str) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + field.encode() + b"}"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ('"temperature":NaN', "temperature"),
        ('"temperature":Infinity', "temperature"),
        ('"temperature":-Infinity', "temperature"),
        ('"temperature":1e999', "temperature"),
        ('"top_p":NaN', "top_p"),
        ('"logit_bias":{"5":NaN}', "logit_bias.5"),
        ('"chat_template_kwargs":{"a":[1,{"b":NaN}]}', "chat_template_kwargs.a[1].b"),
        ('"seed":99999999999999999999', "seed"),
        ('"seed":9223372036854775808', "seed"),
        ('"n":' + "9" * 5000, "n"),
        ('"temperature":true', "temperature"),
        ('"temperature":"1"', "temperature"),
        ('"temperature":2.01', "temperature"),
        ('"temperature":-1e-9', "temperature"),
        ('"top_p":0', "top_p"),
        ('"top_p":1.0000001', "top_p"),
        ('"top_k":-2', "top_k"),
        ('"min_p":1.5', "min_p"),
        ('"presence_penalty":2.1', "presence_penalty"),
        ('"frequency_penalty":-2.1', "frequency_penalty"),
        ('"repetition_penalty":0', "repetition_penalty"),
        ('"max_tokens":0', "max_tokens"),
        ('"max_tokens":1.0', "max_tokens"),
        ('"max_tokens":false', "max_tokens"),
        ('"max_tokens":5,"max_completion_tokens":6', "max_tokens"),
        ('"n":0', "n"),
        ('"top_logprobs":3', "top_logprobs"),
        ('"logprobs":true,"top_logprobs":21', "top_logprobs"),
        ('"logit_bias":{"AI":1}', "logit_bias"),
        ('"logit_bias":{"-1":1}', "logit_bias"),
        ('"logit_bias":{"05":1}', "logit_bias"),
        ('"logit_bias":{"99999999999":1}', "logit_bias"),
        ('"stop":""', "stop"),
        ('"stop":["a",""]', "stop"),
        ('"stop":[1]', "stop[0]"),
        ('"stream_options":{"include_usage":true}', "stream_options"),
        ('"stream":true,"stream_options":{"continuous_usage_stats":true}', "stream_options.continuous_usage_stats"),
        ('"nonsense":1', "nonsense"),
        ('"chat_template":"{{x}}"', "chat_template"),
        ('"prompt_logprobs":1,"stream":true', "prompt_logprobs"),
        ('"prompt_logprobs":-1', "prompt_logprobs"),
        ('"prompt_logprobs":21', "prompt_logprobs"),
        ('"prompt_logprobs":true', "prompt_logprobs"),
        ('"response_format":{"type":"xml"}', "response_format.type"),
        ('"modalities":["text","audio"]', "modalities"),
        ('"functions":[{"name":"f"}]', "functions"),
        ('"function_call":"auto"', "function_call"),
        ('"audio":{"voice":"x"}', "audio"),
        ('"prediction":{"type":"content","content":"x"}', "prediction"),
        ('"web_search_options":{}', "web_search_options"),
        ('"service_tier":"scale"', "service_tier"),
        ('"tools":[{"type":"custom","custom":{"name":"t"}}]', "tools[0].type"),
        ('"tools":[{"type":"function"}]', "tools[0].function"),
        ('"tools":[{"type":"function","function":{"name":"a b"}}]', "tools[0].function.name"),
        ('"tools":[{"type":"function","function":{"name":""}}]', "tools[0].function.name"),
        (f'"tools":[{TOOL},{TOOL}]', "tools[1].function.name"),
        ('"tools":[{"type":"function","function":{"name":"t","returns":{}}}]', "tools[0].function.returns"),
        (
            '"tools":[{"type":"function","function":{"name":"t","parameters":{"type":"string"}}}]',
            "tools[0].function.parameters",
        ),
        (f'"tools":[{TOOL}],"tool_choice":"always"', "tool_choice"),
        (
            f'"tools":[{TOOL}],"tool_choice":{{"type":"allowed_tools","allowed_tools":{{}}}}',
            "tool_choice.allowed_tools.mode",
        ),
        ('"thinking_token_budget":-1', "thinking_token_budget"),
        ('"reasoning_effort":"much"', "reasoning_effort"),
        ('"reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true}', "reasoning_effort"),
        ('"temperature":1,"temperature":1', "temperature"),
        ('"metadata":{"k":1}', "metadata[...]"),
        ('"continue_final_message":true', "continue_final_message"),
        ('"user":"a \\ud83d b"', "user"),
        ('"stop":"\\ude00"', "stop"),
        ('"metadata":{"k":"\\ud83d"}', "metadata.k"),
    ],
)
def test_a_bad_field_is_named(field: str, param: str):
    error = refusal(raw(field))
    assert error.param == param
    assert param.split("[", maxsplit=1)[0] in error.message
    json.dumps(error.message).encode()


@pytest.mark.parametrize("key", ["AI", "-1", "05", "99999999999", "\uff11", "x" * 100])
def test_a_key_that_is_no_token_is_shown(key: str):
    assert f"logit_bias: {key[:40]!r} is no token id" in refusal(raw(f'"logit_bias":{{"{key}":1}}')).message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"3",
        b"{",
        b'{"messages":[]}{}',
        b'{"messages":[{"role":"user","content":"hi"}]} x',
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\xbd"}]}',
        b'{"messages":[{"role":"user","content":"\\ud83d"}],"\\ud83d":1}',
        b'{"messages":[{"role":"user","content":"a\x00b"}]}',
        b'{"a":' * 10_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"messages":' + b"[" * 65 + b"]" * 65 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes):
    refusal(body)


def test_nesting_is_refused_with_the_limit():
    error = refusal(b'{"chat_template_kwargs":' + b'{"a":' * 70 + b"1" + b"}" * 71)
    assert "64" in error.message
    assert "max_json_depth" in error.message


@pytest.mark.parametrize("value", [b"[],", b"1,", b'{"a":{}},', b'"",', b'"\\\\",', b'"a\\"",'])
def test_a_body_of_very_many_values_is_refused_before_it_is_read(value: bytes):
    body = b'{"messages":[{"role":"user","content":"hi"}],"chat_template_kwargs":{"a":[' + value * 200_000 + b"1]}}"
    assert "limit 100000" in refusal(body).message


def test_a_long_text_full_of_commas_and_quotes_is_one_value():
    long = 'a,b[c]{d}"e"\\,' * 30_000
    request, _ = parse(chat_body(messages=[{"role": "user", "content": long}]))
    assert request.messages[0].content == long


def test_a_paired_surrogate_is_text_and_half_a_pair_is_not():
    request, _ = parse(b'{"messages":[{"role":"user","content":"ok \\ud83d\\ude00"}]}')
    assert request.messages[0].content == "ok 😀"
    assert refusal(b'{"messages":[{"role":"user","content":"a \\ud83d b"}]}').param == "messages[0].content"
    body = {"messages": [USER, ASSISTANT, {"role": "tool", "tool_call_id": "c1", "content": "x \ude00 y"}]}
    assert refusal(json.dumps(body).encode()).param == "messages[2].content"


@pytest.mark.parametrize(
    ("limits", "fields", "param", "numbers"),
    [
        ({"max_messages": 2}, {"messages": [USER] * 3}, "messages", "3, limit 2 (access.max_messages)"),
        (
            {"max_content_parts": 1},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]},
            "messages",
            "2, limit 1 (access.max_content_parts)",
        ),
        ({"max_stop": 4}, {"stop": list("abcde")}, "stop", "5, limit 4 (access.max_stop)"),
        ({"max_stop_chars": 3}, {"stop": "abcd"}, "stop", "4, limit 3 (access.max_stop_chars)"),
        ({"max_n": 2}, {"n": 3}, "n", "3, limit 2 (access.max_n)"),
        ({"max_tokens": 9}, {"max_tokens": 10}, "max_tokens", "10, limit 9 (access.max_tokens)"),
        (
            {"max_tokens": 9},
            {"max_completion_tokens": 10},
            "max_completion_tokens",
            "10, limit 9 (access.max_tokens)",
        ),
        ({"max_tools": 1}, {"tools": [{}, {}]}, "tools", "2, limit 1 (access.max_tools)"),
        ({"max_metadata": 1}, {"metadata": {"a": "1", "b": "2"}}, "metadata", "2, limit 1 (access.max_metadata)"),
        (
            {},
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}]},
            "messages[1].content[1]",
            "1, limit 0 (access.max_images)",
        ),
    ],
)
def test_a_limit_names_value_and_limit(limits: dict[str, int], fields: dict[str, Any], param: str, numbers: str):
    error = refusal(chat_body(**fields), **limits)
    assert error.param == param
    assert numbers in error.message


def test_tested_limits_are_in_the_event():
    _, parsed = parse(chat_body(n=2, stop=["ab"], max_tokens=7))
    found = {check.name: (check.value, check.limit) for check in parsed.limits}
    assert found["max_n"] == (2, 8)
    assert found["max_stop_chars"] == (2, 256)
    assert found["max_tokens"] == (7, 32768)
    assert found["max_json_depth"] == (3, 64)
    assert found["max_body_bytes"][0] == parsed.body_bytes


def test_every_served_field_arrives():
    request, parsed = parse(
        chat_body(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.1,
            seed=-(2**63),
            stop=["a", "b", "a"],
            n=2,
            logit_bias={"0": -100, "7": 1.5},
            logprobs=True,
            top_logprobs=20,
            max_completion_tokens=9,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": True},
            user="u",
            metadata={"k": "v"},
            chat_template_kwargs={"enable_thinking": False},
            response_format={"type": "text"},
            tool_choice="none",
            modalities=["text"],
            store=False,
            service_tier="auto",
            parallel_tool_calls=True,
            functions=None,
        )
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.1)
    assert (sampling.seed, request.stop, request.n) == (-(2**63), ("a", "b"), 2)
    assert request.logit_bias == ((0, -100.0), (7, 1.5))
    assert (request.logprobs, request.top_logprobs, request.max_tokens) == (True, 20, 9)
    assert (request.stream, request.include_usage, request.user) == (True, True, "u")
    assert (request.metadata, request.template_kwargs) == ({"k": "v"}, {"enable_thinking": False})
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
    fields = [warning.partition(":")[0] for warning in parsed.warnings]
    assert fields == ["store", "parallel_tool_calls", "stream_options.include_obfuscation"]


def test_silence_stays_silence():
    request, parsed = parse({"messages": [USER]})
    assert request.model == "only"
    assert request.sampling == type(request.sampling)()
    assert (request.max_tokens, request.n, request.stop) == (None, 1, ())
    assert parsed.warnings == ("model: not given, only was used",)


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        ([], "required"),
        (
            [{"type": "function", "function": {"name": "get_time"}}],
            {"type": "function", "function": {"name": "get_tme"}},
        ),
        (None, {"type": "function", "function": {"name": "get_time"}}),
        (None, {"type": "function"}),
        (None, "sometimes"),
        (None, 3),
    ],
)
def test_a_tool_choice_that_cannot_be_kept_is_refused(tools: Any, choice: Any):
    body = chat_body(tool_choice=choice) | ({"tools": tools} if tools is not None else {})
    assert refusal(body).param == "tool_choice"


def test_calls_that_have_to_come_are_asked_for():
    tool = json.loads(TOOL)
    strict = {"type": "function", "function": {"name": "s", "strict": True}}
    request, _ = parse(chat_body(tools=[tool, strict], tool_choice="required"))
    assert ([one.strict for one in request.tools], request.tool_choice.mode) == ([False, True], "required")
    request, _ = parse(chat_body(tools=[tool], tool_choice={"type": "function", "function": {"name": "t"}}))
    assert (request.tool_choice.mode, request.tool_choice.names) == ("required", ("t",))


@pytest.mark.parametrize(("tools", "choice"), [(None, "none"), ([], "auto"), ([], None), (None, None)])
def test_no_tools_and_no_wish_for_one_is_plain_text(tools: Any, choice: Any):
    parse(chat_body(tools=tools, tool_choice=choice))


async def test_a_refused_number_is_a_400_with_a_valid_body_and_the_next_request_is_served():
    edge = Edge()
    answer = await edge.ask("/v1/chat/completions", raw('"temperature":NaN'))
    assert answer.status == 400
    assert answer.error["param"] == "temperature"
    assert answer.error["type"] == "invalid_request_error"
    assert (await edge.chat()).status == 200


@pytest.mark.parametrize("value", ["false", "true", 0, 1, None, [], {}])
def test_thinking_is_asked_for_with_a_boolean(value: Any):
    error = refusal(chat_body(chat_template_kwargs={"enable_thinking": value}))
    assert error.param == "chat_template_kwargs.enable_thinking"
