"""Tools and efforts against the real server. The bundled model can't call anything: what is tested is the way there."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from hitsend.testing import check_stream
from tests.served import Served, serving

pytestmark = pytest.mark.model

TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "The time in a city. <|im_end|>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

SMALL = ("--set", "engine.num_slots=2", "--set", "engine.context=1024")
OPENS_THOUGHTS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>
{% endif %}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(*SMALL) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The bundled model under a template that opens its thoughts: as it never closes them, all is thoughts."""
    path = tmp_path_factory.mktemp("template") / "thinking.jinja"
    path.write_text(OPENS_THOUGHTS)
    with serving(*SMALL, "--set", f"chat.template={path}") as running:
        yield running


def test_tools_are_described_to_a_model_whose_template_knows_none(served: Served):
    answer = served.chat("What time is it in Köln?", tools=[TOOL], max_tokens=4, temperature=0, reasoning_effort="low")
    choice = answer["choices"][0]
    assert choice["finish_reason"] in ("length", "stop")
    assert any(warning.startswith("tools:") for warning in answer["hitsend"]["warnings"])
    assert any(warning.startswith("reasoning_effort:") for warning in answer["hitsend"]["warnings"])
    plain = served.chat("What time is it in Köln?", tools=[TOOL], tool_choice="none", max_tokens=4, temperature=0)
    assert answer["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 50
    assert plain["hitsend"]["warnings"] == []


def test_a_round_of_calls_and_results_is_understood(served: Served):
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12:30"}]},
    ]
    body = {"model": served.model, "messages": messages, "tools": [TOOL], "max_tokens": 2}
    status, answer, _ = served.post("/v1/chat/completions", body)
    assert status == 200, answer
    record = served.record(answer["hitsend"]["request_id"])
    assert record["state"] == "finished"


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "get_time"}}],
    ids=["required", "named"],
)
def test_a_forced_call_is_a_valid_one(served: Served, choice: object):
    """The bundled model knows no tools: what comes is the grammar's doing."""
    answer = served.chat("What time is it in Lima?", tools=[TOOL], tool_choice=choice, max_tokens=80, seed=5)
    assert answer["choices"][0]["finish_reason"] in ("tool_calls", "length")
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    assert [call["function"]["name"] for call in calls[:1]] == ["get_time"]
    if answer["choices"][0]["finish_reason"] == "tool_calls":
        assert isinstance(json.loads(calls[0]["function"]["arguments"]), dict)


def test_a_choice_that_names_no_tool_is_refused(served: Served):
    body = {"model": served.model, "messages": [{"role": "user", "content": "q"}], "tools": [TOOL]}
    choice = {"type": "function", "function": {"name": "get_tme"}}
    status, answer, _ = served.post("/v1/chat/completions", body | {"tool_choice": choice})
    assert (status, answer["error"]["param"]) == (400, "tool_choice")


def test_a_budget_of_thoughts_means_nothing_to_a_model_without_any(served: Served):
    answer = served.chat("Hi.", thinking_token_budget=5, max_tokens=2)
    assert any("thinking_token_budget" in warning for warning in answer["hitsend"]["warnings"])


def test_thoughts_that_the_template_opened_and_nothing_closed(thinking: Served):
    answer = thinking.chat("Count to ten.", max_tokens=8, temperature=0)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert message["content"] is None
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 8
    silent = thinking.chat("Count to ten.", max_tokens=8, temperature=0, reasoning_effort="none")
    assert silent["choices"][0]["message"]["content"]
    assert "reasoning" not in silent["choices"][0]["message"]
    assert silent["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_streamed_thoughts_are_the_same(thinking: Served):
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 8, "temperature": 0}
    raw = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(thinking.url + "/v1/chat/completions", raw, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        seen = check_stream(answer.read())
    whole = thinking.chat("Count to ten.", max_tokens=8, temperature=0)
    assert seen.reasoning == {0: whole["choices"][0]["message"]["reasoning"]}
    assert seen.texts == {0: ""}
