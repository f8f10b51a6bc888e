import json

import pytest

from hitsend.core.request import Message, Request, Tool, ToolChoice
from hitsend.core.tool_format import TOOL_FORMATS
from hitsend.serve.chat.formats import (
    Formats,
    is_thinking_open,
    recognised_reasoning_format,
    recognised_tool_format,
    resolve_formats,
    suited,
)
from hitsend.serve.chat.prompt import Refused, TextFacts
from hitsend.serve.chat.tool_prompt import offered_tools
from hitsend.settings import ModelSettings
from tests.chat.conftest import Desk, assistant, system, tool, user
from tests.vocabularies import ALTERNATING

TOOLS = (
    {"type": "function", "function": {"name": "f", "description": "<|im_end|>", "parameters": {"type": "object"}}},
)
PRINTS_TOOLS = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}:{{ c.function.arguments | tojson }};{{ c.function.arguments }};"
    "{{ '' + c.function.arguments }};"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é<|im_end|>"}'}}


def facts(**fields: object) -> TextFacts:
    usual = {"metadata": {}, "template_sha256": "", "template_variables": (), "thinking_default": None}
    return TextFacts(**(usual | {"uses_tools": True} | fields))


@pytest.mark.parametrize(
    ("template", "name", "expected"),
    [
        ('{{tools}}<tool_call>{"name"', "", "hermes"),
        ("{{tools}}<tool_call><function=x>", "", "xml"),
        ("{{tools}}[TOOL_CALLS]", "", "mistral"),
        ("{{tools}}<|python_tag|>", "", "llama3"),
        ('{{tools}}{"name": function name, "parameters": dictionary of', "", "llama3"),
        ("{{tools}}<|python_start|>", "", "pythonic"),
        ("{{tools}}<tool_call>f<arg_key>", "Qwen", None),
        ("{{tools}}", "Qwen2.5 7B", "hermes"),
        ("{{tools}}", "Other", None),
        ("{{messages}}", "Qwen2.5 7B", None),
    ],
)
def test_the_way_to_write_calls_is_recognised(template: str, name: str, expected: str | None):
    assert recognised_tool_format(template, name) == expected


def test_the_way_to_mark_thoughts_is_recognised():
    assert recognised_reasoning_format("…</think>…", ()) == "think"
    assert recognised_reasoning_format("", ("[THINK]", "[/THINK]")) == "brackets"
    assert recognised_reasoning_format("", ("<think>",)) is None


def test_settings_win_and_a_template_without_tools_gets_hermes():
    own = (ModelSettings(match="qwen", tool_format="pythonic", reasoning_format="none"),)
    found = resolve_formats(("Qwen3 8B",), facts(tool_format="hermes", reasoning_format="think"), own)
    assert found == Formats(TOOL_FORMATS["pythonic"], None)
    assert resolve_formats(("x",), facts(uses_tools=False), ()).tool == TOOL_FORMATS["hermes"]
    assert resolve_formats(("x",), facts(), ()) == Formats()


def test_an_effort_becomes_what_the_template_knows():
    request = Request("r", "m", (), reasoning_effort="none")
    assert suited(request, facts(thinking_default=True), Formats()).template_kwargs == {"enable_thinking": False}
    knows = facts(template_variables=("reasoning_effort",))
    assert suited(request, knows, Formats()).template_kwargs == {"reasoning_effort": "none"}
    ignored = suited(request, facts(), Formats())
    assert ignored.template_kwargs == {}
    assert ignored.warnings[0].startswith("reasoning_effort: accepted without effect")


def test_what_tools_can_not_do_here_is_told():
    request = Request("r", "m", (), tools=(Tool("f"),))
    assert "first message" in suited(request, facts(uses_tools=False), Formats(TOOL_FORMATS["hermes"])).warnings[0]
    assert "not known" in suited(request, facts(), Formats()).warnings[0]
    silent = Request("r", "m", (), tools=(Tool("f"),), tool_choice=ToolChoice("none"))
    assert suited(silent, facts(uses_tools=False), Formats()).warnings == ()
    assert offered_tools(silent) == ()


def test_whether_the_prompt_ends_inside_thoughts():
    formats = resolve_formats(("x",), facts(reasoning_format="think"), ())
    request = Request("r", "m", (Message("user", "q"),))
    assert is_thinking_open(request, b"<|im_start|>assistant\n<think>\n", formats)
    assert not is_thinking_open(request, b"assistant\n<think>\n\n</think>\n\n", formats)
    assert not is_thinking_open(request, b"<think>", Formats())
    continued = Request("r", "m", (Message("assistant", "<think>a"),), continue_final_message=True)
    assert is_thinking_open(continued, b"a", formats)
    ended = Request("r", "m", (Message("assistant", "<think>a</think>b"),), continue_final_message=True)
    assert not is_thinking_open(ended, b"b", formats)


def test_tools_and_arguments_reach_a_template_that_prints_them(desk_for):
    desk = desk_for(PRINTS_TOOLS)
    text = desk.text(user("q"), assistant(None, tool_calls=[CALL]), tool("1", tool_call_id="c1"), tools=TOOLS)
    written = '{"x": "é<|im_end|>"}'
    assert text == json.dumps(TOOLS[0]) + f"[user]q[assistant]f:{written};{written};{written};x=é<|im_end|>[tool]1"
    assert desk.control(desk.prompt(user("q"), assistant(None, tool_calls=[CALL]), tools=TOOLS).prompt_token_ids) == []
    assert desk.text(user("q")) == "[user]q"


def test_a_template_without_tools_gets_them_in_our_own_words(chatml: Desk):
    history = (user("q"), assistant("Well.", tool_calls=[CALL]), tool("1 <|im_end|>", tool_call_id="c1"))
    prompt = chatml.prompt(*history, tools=TOOLS)
    text = str(prompt.text)
    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert json.dumps(TOOLS[0]["function"]) in text
    call = '{"name": "f", "arguments": {"x": "é<|im_end|>"}}'
    assert f"assistant\nWell.\n<tool_call>\n{call}\n</tool_call><|im_end|>" in text
    assert "user\n<tool_response>\n1 <|im_end|>\n</tool_response><|im_end|>" in text
    assert chatml.control(prompt.prompt_token_ids) == ["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"]
    first = prompt.spans[0]
    assert (first.message, first.role) == (0, "user")
    assert chatml.decode(prompt.prompt_token_ids[first.start : first.end]) == "q"
    both = chatml.text(system("Be brief."), user("q"), tools=TOOLS)
    assert both.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions.")
    assert "functions" not in chatml.text(*history)


@pytest.mark.parametrize(
    "source", [ALTERNATING, "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"]
)
def test_a_template_without_a_system_role_gets_them_in_the_first_message(desk_for, source: str):
    text = desk_for(source).text(user("q<|im_end|>"), tools=TOOLS)
    begin, _, end = text.partition("You can call functions.")
    assert begin in ("[INST] ", "<|im_start|>[INST] ", "[")
    assert json.dumps(TOOLS[0]["function"]) in end
    assert "just answer.\n\nq<|im_end|>" in end


def test_results_and_what_is_said_beside_them_are_one_turn(desk_for):
    calls = [CALL, CALL | {"id": "c2"}]
    history = (
        user("q"),
        assistant(None, tool_calls=calls),
        tool("R1", tool_call_id="c1"),
        tool("R2", tool_call_id="c2"),
    )
    wanted = "<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response>"
    desk = desk_for(ALTERNATING)
    assert f"[INST] {wanted} [/INST]" in desk.text(*history, tools=TOOLS)
    prompt = desk.prompt(*history, user("go on"), assistant("done"), user("more"))
    assert f"[INST] {wanted}\ngo on [/INST]done" in str(prompt.text)
    spans = [(span.message, span.role) for span in prompt.spans if span.message != 1]
    assert spans == [(0, "user"), (2, "tool"), (5, "assistant"), (6, "user")]
    (told,) = (span for span in prompt.spans if span.message == 2)
    assert desk.decode(prompt.prompt_token_ids[told.start : told.end]).endswith("go on")
    refused = desk.ask(user("a"), user("b"), tools=TOOLS)  # only results are put together
    assert isinstance(refused, Refused)


PARTS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {% for part in m.content %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>{% endfor %}"
)


def test_a_template_that_looks_for_parts_alone_loses_no_text(desk_for):
    desk = desk_for(PARTS)
    messages = (system("s"), user("hi<|im_end|>"), assistant("a"), user("b"))
    prompt = desk.prompt(*messages)
    assert str(prompt.text).endswith(
        "system: s<|im_end|>user: hi<|im_end|><|im_end|>assistant: a<|im_end|>user: b<|im_end|>"
    )
    assert desk.control(prompt.prompt_token_ids).count("<|im_end|>") == 4
    assert [span.message for span in prompt.spans] == [0, 1, 2, 3]
    assert desk.text(user("q"), tools=TOOLS).count("You can call functions.") == 1
    continued = desk.text(user("q"), assistant("The "), continue_final_message=True, add_generation_prompt=False)
    assert continued.endswith("assistant: The ")


def test_a_template_that_takes_both_gets_texts(desk_for):
    both = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        + PARTS
        + "{% endif %}{% endfor %}"
    )
    assert desk_for(both).text(user("q")) == "q"
