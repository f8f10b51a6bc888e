"""What templates may and may not do. Cases: tpl-null-content, tpl-system-in-middle, tpl-reasoning-replay."""

import json
import sys
from typing import Any

import pytest

from hitsend.core.errors import ConfigError, EngineFailed, InvalidRequest
from hitsend.core.request import Message
from hitsend.serve.chat.prompt import Refused
from hitsend.serve.chat.template import ChatTemplate, thinking_default
from tests.chat.conftest import Desk, assistant, system, tool, user
from tests.vocabularies import ALTERNATING, CHATML, HEADERS, THINKING

HI = [{"role": "user", "content": "hi"}]


def template(source: str, max_chars: int = 1_000_000) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, max_chars=max_chars)


def render(source: str, messages: Any = HI, **arguments: Any) -> str:
    return template(source).render(messages, arguments, add_generation_prompt=True)


def test_blocks_leave_no_blanks_behind():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_json_is_written_as_models_saw_it_in_training():
    value = {"q": "<b> & 'é' 中"}
    assert render("{{ value | tojson }}", value=value) == json.dumps(value, ensure_ascii=False)
    assert (
        render("{{ {'b': 1, 'a': [1]} | tojson(indent=2, sort_keys=true) }}") == '{\n  "a": [\n    1\n  ],\n  "b": 1\n}'
    )


def test_loops_may_break_and_continue():
    skip, stop = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 3 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip + stop + "{{ i }}{% endfor %}") == "02"


def test_training_marks_are_only_their_contents():
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"


def test_dates_can_be_printed_but_not_blown_up():
    assert render("{{ strftime_now('%Y') }}").isdigit()
    with pytest.raises(EngineFailed, match="date format"):
        render("{{ strftime_now('%099999d') }}")


def test_none_is_never_printed():
    assert render("[{{ none }}][{{ messages[0].nothing }}]") == "[][]"


def test_absent_tools_are_none_as_templates_expect():
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"


@pytest.mark.parametrize("content", [None, ""])
def test_null_content_renders_as_empty_content(thinking: Desk, chatml: Desk, content: str | None):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    for desk in (thinking, chatml):
        text = desk.text(user("go"), assistant(content, tool_calls=[call]), tool("ok", tool_call_id="c1"))
        assert text == desk.text(user("go"), assistant("", tool_calls=[call]), tool("ok", tool_call_id="c1"))
        assert "None" not in text
        assert "null" not in text


def test_calls_of_the_history_are_told_to_a_template_that_knows_none(chatml: Desk):
    """With no tools offered any more, too: what the assistant called is part of the conversation."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":"Köln"}'}}
    turns = (user("go"), assistant(None, tool_calls=[call, call | {"id": "c2"}]), tool("ok", tool_call_id="c1"))
    text = chatml.text(*turns)
    assert text.count('{"name": "f", "arguments": {"a": "Köln"}}') == 2
    assert text.count("<tool_response>\nok\n</tool_response>") == 1
    printing = chatml.with_template("{% for m in messages %}{{ m.role }}:{{ m.tool_calls }};{% endfor %}")
    assert "<tool_call>" not in printing.text(*turns)


def test_null_fields_count_as_absent(thinking: Desk):
    with_nulls = assistant("yes", tool_calls=None, reasoning_content=None, name=None)
    assert thinking.text(user("a"), with_nulls) == thinking.text(user("a"), assistant("yes"))


@pytest.mark.parametrize("depth", [1, 30])
def test_a_system_message_in_the_middle_is_refused_in_the_templates_words(thinking: Desk, depth: int):
    turns = [user("hi"), assistant("hello")] * depth
    answer = thinking.ask(*turns, system("be brief"), user("go on"))
    assert isinstance(answer, Refused)
    assert (answer.code, answer.param) == ("invalid_request", "messages")
    assert "System message must be at the beginning." in answer.message


def test_two_user_turns_in_a_row_are_refused_where_turns_must_alternate(alternating: Desk):
    answer = alternating.ask(user("a"), user("b"))
    assert isinstance(answer, Refused)
    assert answer.code == "invalid_request"
    assert "Roles must alternate" in answer.message


def test_templates_that_allow_a_system_message_anywhere_keep_its_place(chatml: Desk):
    assert chatml.text(user("a"), system("b"), user("c")).index("system") > chatml.text(user("a")).index("a")


def test_a_refusal_that_quotes_a_message_shows_it_as_it_was_typed(desk_for):
    desk = desk_for("{{ raise_exception('bad: ' + messages[0].content) }}")
    answer = desk.ask(user("x<|im_end|>y<"))
    assert isinstance(answer, Refused)
    assert answer.message.endswith("bad: x<|im_end|>y<")


def test_reasoning_after_the_last_question_is_replayed_exactly_once(thinking: Desk):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = assistant(None, reasoning_content="R-CANARY", tool_calls=[call])
    text = thinking.text(user("q"), turn, tool("1", tool_call_id="c1"))
    assert text.count("R-CANARY") == 1
    assert "<think>\nR-CANARY\n</think>" in text
    # the template itself drops it once another question followed
    assert "R-CANARY" not in thinking.text(user("q"), turn, tool("1", tool_call_id="c1"), user("next"))


def test_reasoning_inside_the_content_is_found_by_the_template(thinking: Desk):
    text = thinking.text(user("q"), assistant("<think>\nwhy\n</think>\n\nbecause"), user("more"))
    assert "why" not in text
    assert "because" in text


def test_tool_arguments_are_an_object_again(thinking: Desk):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é", "b": null}'}}
    assert '{"name": "f", "arguments": {"a": "é", "b": null}}' in thinking.text(
        user("q"), assistant(None, tool_calls=[call])
    )


@pytest.mark.parametrize(
    "arguments",
    ["not json", "[1]", "[" * 100_000, *('{"a":' * n + "1" + "}" * n for n in (66, 480, 700, 960, 3000))],
)
def test_tool_arguments_that_are_no_object_stay_text(thinking: Desk, arguments: str):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert json.dumps(arguments) in thinking.text(user("q"), assistant(None, tool_calls=[call]))


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r'{"a": "x\ud83d"}', '{"a": "x\ufffd"}'),
        (r'{"\udc00": ["\ud83d\ud83d"]}', '{"\ufffd": ["\ufffd\ufffd"]}'),
        (r'{"a": "\ud83d\ude00"}', '{"a": "\U0001f600"}'),
        (r'{"a": "\\ud83d"}', r'{"a": "\\ud83d"}'),
    ],
)
def test_half_a_character_that_a_model_escaped_ends_no_conversation(thinking: Desk, written: str, shown: str):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": written}}
    assert f'"arguments": {shown}' in thinking.text(user("q"), assistant(None, tool_calls=[call]))


@pytest.mark.parametrize("char", ["\ufdd0", "\ufdd1", "\ufdd2", "\U0001fffe"])
def test_a_mark_is_no_character_that_an_escape_means(thinking: Desk, char: str):
    written = json.dumps({"a": f"x{char}<|im_{char}end|>"})
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": written}}
    prompt = thinking.prompt(user("q"), assistant(None, tool_calls=[call]))
    assert f"x{char}<|im_{char}end|>" in str(prompt.text)


def test_what_nobody_thought_of_ends_the_request_and_not_the_process(thinking: Desk):
    refused = thinking.ask(Message("user", "q", {"name": "\ud83d"}))  # the edge lets nothing like it in
    assert isinstance(refused, Refused)
    assert (refused.code, "UnicodeEncodeError" in refused.message) == ("engine_failed", True)
    assert thinking.text(user("q"))


def test_thinking_is_switched_by_the_argument(thinking: Desk):
    assert thinking.text(user("q")).endswith("<think>\n")
    assert thinking.text(user("q"), template_kwargs={"enable_thinking": True}).endswith("assistant\n<think>\n")
    assert thinking.text(user("q"), template_kwargs={"enable_thinking": False}).endswith("</think>\n\n")


@pytest.mark.parametrize(
    ("source", "expected"), [(THINKING, True), (CHATML, None), ("{{ 'a' if enable_thinking else 'b' }}", False)]
)
def test_what_happens_without_the_argument_is_found_out(source: str, expected: bool | None):
    assert thinking_default(template(source)) is expected


@pytest.mark.parametrize(
    "name", ["messages", "tools", "bos_token", "raise_exception", "self", "range", "add_generation_prompt"]
)
def test_the_servers_own_variables_cant_be_sent(chatml: Desk, name: str):
    answer = chatml.ask(user("a"), template_kwargs={name: "x"})
    assert isinstance(answer, Refused)
    assert answer.param == f"chat_template_kwargs.{name}"


def test_an_argument_that_the_template_does_not_read_is_named(chatml: Desk):
    answer = chatml.ask(user("a"), template_kwargs={"colour": "red"})
    assert isinstance(answer, Refused)
    assert "chat_template_kwargs.colour" in answer.message
    assert isinstance(chatml.ask(user("a"), template_kwargs={"enable_thinking": False}), object)


def test_developer_is_system_where_the_template_does_not_know_it(chatml: Desk, desk_for):
    from hitsend.core.request import Message

    assert "<|im_start|>system\nbe" in chatml.text(Message("developer", "be"), user("a"))
    knows = desk_for("{# developer #}" + CHATML)
    assert "<|im_start|>developer\nbe" in knows.text(Message("developer", "be"), user("a"))


def test_an_unknown_role_is_refused(chatml: Desk):
    from hitsend.core.request import Message

    answer = chatml.ask(Message("im_end", "x"))
    assert isinstance(answer, Refused)
    assert answer.param == "messages[0].role"


def test_a_started_answer_is_continued_without_closing_it(chatml: Desk, headers: Desk):
    text = chatml.text(user("a"), assistant("The answer is "), continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    assert headers.text(user("a"), assistant("Four"), continue_final_message=True).endswith("<|end_header_id|>\n\nFour")
    refused = chatml.ask(user("a"), continue_final_message=True)
    assert isinstance(refused, Refused)
    assert refused.param == "continue_final_message"


def test_a_prefilled_answer_is_a_turn_like_any_other(chatml: Desk):
    assert chatml.text(user("a"), assistant("b")).endswith("b<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.text(user("a"), assistant("b"), add_generation_prompt=False).endswith("b<|im_end|>\n")


def test_trimming_templates_trim_and_nothing_else_does(headers: Desk, chatml: Desk):
    assert "\n\nhi<|eot_id|>" in headers.text(user("  hi \n"))
    assert "user\n  hi \n<|im_end|>" in chatml.text(user("  hi \n"))


def test_the_hash_tells_templates_apart():
    assert template(CHATML).sha256 == template(CHATML).sha256 != template(HEADERS).sha256


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% nonsense %}", "{{ 'a' | no_such_filter }}"])
def test_a_template_that_can_not_be_compiled_is_a_settings_error(source: str):
    with pytest.raises(ConfigError, match="can't be compiled"):
        template(source)


@pytest.mark.parametrize(
    "source", ["{% include '/etc/passwd' %}", "{% import 'x' as y %}", "{% from 'x' import y %}", "{% extends 'x' %}"]
)
def test_a_template_that_reads_files_is_a_settings_error(source: str):
    with pytest.raises(ConfigError, match="reads files"):
        template(source)


@pytest.mark.parametrize(
    "source", [ALTERNATING, "{{ messages[0].a.b.c }}", "{{ 1 / 0 }}", "{{ [1][5].x }}", "{{ 'a' + 1 }}", "{{ none() }}"]
)
def test_other_failures_are_the_templates_own_and_say_so(source: str):
    if source == ALTERNATING:
        assert render(source)
        return
    with pytest.raises(EngineFailed, match="chat template"):
        render(source)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__['os'].system('id') }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ range.__self__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace().__dict__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ dict.mro() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ self['_TemplateReference__context'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace()) }}",
    "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "{{ '%s' | format(messages.__class__) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ ['{0.__class__}'] | map('format', 1) | list }}",
    "{{ [''] | map('attr', '__class__') | list }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ [messages] | groupby('__class__') }}",
    "{{ [''] | selectattr('__class__') | list }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].pop('role') }}",
    "{% set x = messages[0].setdefault('a', 1) %}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ open('/etc/passwd') }}",
    "{{ __import__('os') }}",
    "{{ eval('1') }}",
    "{{ config }}{{ request.application }}{{ get_flashed_messages.__globals__ }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ (messages | list).__class__ }}",
    "{{ caller.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func.__globals__ }}",
    "{{ loop.__class__ }}{% for a in [1] %}{{ loop._iterator }}{{ loop.__init__ }}{% endfor %}",
    "{{ messages | xmlattr }}",
    "{{ (1).__class__ }}{{ 1.0.__class__ }}{{ true.__class__ }}",
    "{{ ''.encode().__class__ }}",
    "{{ ''.join.__self__.__class__ }}",
    "{{ (namespace | string) | attr('__globals__') }}",
    "{{ messages | map('string') | map('attr', '__class__') | first }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ tojson.__globals__ }}",
]  # fmt: skip


def test_no_template_reaches_files_sockets_processes_or_internals():
    seen: list[str] = []
    watching = False

    def watch(event: str, _: tuple[Any, ...]) -> None:
        if watching and event.startswith(
            ("open", "socket", "subprocess", "os.", "import", "exec", "compile", "ctypes")
        ):
            seen.append(event)

    sys.addaudithook(watch)  # hooks can't be removed: this one sleeps afterwards
    for source in ESCAPES:
        made = _made(source)
        if made is None:
            continue
        watching = True
        try:
            text = made.render([dict(m) for m in HI], {}, add_generation_prompt=True)
        except (EngineFailed, InvalidRequest):
            text = ""
        finally:
            watching = False
        assert "<class" not in text, source
        assert "<function" not in text or "globals" not in text, source
        assert "root:" not in text, source
    assert seen == []


def _made(source: str) -> ChatTemplate | None:
    try:
        return template(source)
    except ConfigError:
        return None


BOMBS = [
    "{{ 'a' * 999999999 }}",
    "{{ 999999999 * 'a' }}",
    "{{ [1] * 999999999 }}",
    "{{ 9 ** 9999999 }}",
    "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a' * 9000) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a'.ljust(999999999) }}",
    "{{ 'a'.zfill(width=999999999) }}" if sys.version_info < (3, 11) else "{{ 'a'.zfill(999999999) }}",
    "{{ '\t'.expandtabs(999999999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a\nb' | indent(999999999) }}",
    "{{ [1] | batch(999999999, 'x') | list }}",
    "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "{{ ('b' * 9999).join('a' * 9999) }}",
    "{% for i in range(9000) %}{% for j in range(9000) %}{% endfor %}{% endfor %}",
    "{{ range(999999999) | list }}",
    "{% for i in range(99) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ {'a': 1} | tojson(indent=999999999) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS)
def test_what_would_not_end_or_not_fit_is_stopped_before_it_starts(source: str):
    with pytest.raises(EngineFailed, match="chat template"):
        render(source)


def test_the_step_count_starts_anew_with_each_rendering():
    counted = template("{% for i in range(3000000) %}{% endfor %}")
    for _ in range(3):
        counted.render(HI, {}, add_generation_prompt=True)
