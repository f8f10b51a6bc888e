"""What a request's answer is held to, as a grammar: an output format, calls that must come, or either of them.

Enters: a `Request`'s wishes, and how this model writes calls and thoughts. Leaves: a `GrammarSource` for the text child
to compile, and what the loop does with it (`constraint_spec`), or None where the answer is free. Always true: what is
forced is what the parsers in `output/` read, because both come from one `ToolFormat`; a delimiter that is a control
token of this model is forced as that token, never spelled; calls that nobody forces stay free (`tool_choice` auto
without strict). Next: `text.py`.

    tool_choice required              one call, or several where parallel calls are allowed; nothing else
    tool_choice names a function      exactly one call of it; nothing else
    auto, and a tool is strict        any text; a call that begins has to be a valid one
    auto, and an output format        either calls or the formatted answer
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from hitsend.core.constraint import ConstraintSpec, GrammarSource
from hitsend.core.errors import InvalidRequest
from hitsend.core.request import OutputFormat, Request, Tool, ToolChoice
from hitsend.core.tool_format import ReasoningFormat, ToolFormat
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.xml_values import json_rule, slashed, xml_value

_NARROWING = frozenset({"const", "enum", "anyOf", "oneOf", "allOf", "$ref"})
ANY_OBJECT: dict[str, Any] = {"type": "object"}
_ANY_TEXT = r"/(.|\n)*/"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def grammar_source(request: Request, tool_format: ToolFormat | None, vocabulary: Vocabulary) -> GrammarSource | None:
    """The grammar of this request's answer. Raises InvalidRequest where its wishes exclude each other."""
    choice = request.tool_choice
    tools = request.tools if tool_format is not None and choice.mode != "none" else ()
    answer = request.output_format
    if tool_format is None or not tools:
        return output_source(answer) if answer is not None else None
    calls = Calls(tools, choice, tool_format, vocabulary, is_parallel=request.parallel_tool_calls)
    if choice.mode == "required":
        return calls.forced()
    if answer is not None:
        return calls.or_answer(answer)
    return calls.when_begun() if any(tool.strict for tool in tools) else None


def output_source(wanted: OutputFormat) -> GrammarSource:
    """The grammar of an output format alone."""
    if wanted.kind == "json_object":
        return GrammarSource("json_schema", ANY_OBJECT)
    param = "response_format" if wanted.kind == "json_schema" else "structured_outputs"
    return GrammarSource(wanted.kind, wanted.value, param)


def constraint_spec(
    grammar: str | None,
    reasoning: ReasoningFormat | None,
    vocabulary: Vocabulary,
    *,
    is_open: bool = False,
    may_open: bool = False,
    budget: int | None = None,
) -> ConstraintSpec | None:
    """What the loop does with a compiled grammar and a budget of thoughts; None: nothing.

    `is_open`: the prompt ends inside thoughts. `may_open`: the model may open them itself. Raises InvalidRequest where
    this model's marks of thoughts aren't single tokens: then nobody could wait for them, nor force them.
    """
    is_thinking = reasoning is not None and (is_open or may_open)
    if grammar is None and (budget is None or not is_thinking):
        return None
    if reasoning is None or not is_thinking:
        return ConstraintSpec(grammar)
    begin, end = _single(reasoning.begin, vocabulary), _single(reasoning.end, vocabulary)
    if end is None or (begin is None and not is_open):
        param = "thinking_token_budget" if grammar is None else "response_format"
        why = f"this model writes {reasoning.end} in several tokens, so nobody can wait for it; turn thinking off"
        raise InvalidRequest(f"{param}: {why}", param=param)
    opens_with = () if is_open or begin is None else (begin,)
    return ConstraintSpec(grammar, (end,), opens_with, budget)


class Calls:
    """Grammars over the calls of one request."""

    def __init__(
        self,
        tools: tuple[Tool, ...],
        choice: ToolChoice,
        form: ToolFormat,
        vocabulary: Vocabulary,
        *,
        is_parallel: bool,
    ) -> None:
        self._form = form
        self._vocabulary = vocabulary
        # a named function is called exactly once, as at OpenAI; a weak model would repeat it to the last token
        self._is_parallel = is_parallel and not choice.names
        self._is_forced = choice.mode == "required"
        self._tools = [(i, tool) for i, tool in enumerate(tools) if not choice.names or tool.name in choice.names]
        if not self._tools:
            raise InvalidRequest("tool_choice names no function of tools", param="tool_choice")
        for i, tool in self._tools:
            if not _NAME.fullmatch(tool.name):
                raise InvalidRequest(f"tools[{i}].function.name: {tool.name[:64]!r} can't be forced", param="tools")
        self._rules: list[str] = []

    def forced(self) -> GrammarSource:
        """Calls and nothing else."""
        return self._source("start: calls", self._calls())

    def or_answer(self, answer: OutputFormat) -> GrammarSource:
        """Calls, or the formatted answer."""
        schemas: tuple[tuple[str, Any], ...] = ()
        if answer.kind in ("json_object", "json_schema"):
            schema = ANY_OBJECT if answer.kind == "json_object" else answer.value
            schemas = (("response_format", schema),)
            line = f"answer: {json_rule(schema)}"
        elif answer.kind == "choice":
            line = "answer: " + " | ".join(_literal(each) for each in answer.value)
        elif answer.kind == "regex":
            line = f"answer: {slashed(answer.value)}"
        else:
            text = "a Lark grammar can't be combined with tools; set tool_choice to none"
            raise InvalidRequest(f"structured_outputs: {text}", param="structured_outputs")
        return self._source("start: calls | answer", self._calls(), line, schemas=schemas)

    def when_begun(self) -> GrammarSource:
        """Any text, and valid calls in it."""
        form, call = self._form, self._call()
        token = self._control(form.begin) if form.begin else None
        free = f"text: {_ANY_TEXT}"
        if form.bare:
            more = f" ({token} one text)*" if token is not None else ""
            first = rf"first: /\s*([^\s{re.escape(form.bare)}](.|\n)*)?/"
            return self._source(f"start: calls | first{more}", self._calls(), first, *([free] if more else []))
        if token is not None:
            return self._source(f"start: text ({token} rest text)*", f"rest: {call.removeprefix(token)}", free)
        rest = call.removeprefix(_literal(form.begin))
        lines = ("start: (head rest)* text", f"head[lazy]: TEXT {_literal(form.begin)}", f"rest: {rest}")
        return self._source(*lines, "text: TEXT", f"TEXT: {_ANY_TEXT}")

    def _source(self, *lines: str, schemas: tuple[tuple[str, Any], ...] = ()) -> GrammarSource:
        checked = tuple((f"tools[{i}].function.parameters", self._schema(tool)) for i, tool in self._tools)
        return GrammarSource("lark", "\n".join([*lines, *self._rules]), "tools", checked + schemas)

    def _schema(self, tool: Tool) -> dict[str, Any]:
        """What the arguments are held to: a tool that isn't strict is so only where a call is forced."""
        if not (tool.strict or self._is_forced):
            return ANY_OBJECT
        return {"type": "object"} | tool.parameters

    def _calls(self) -> str:
        form, call = self._form, self._call()
        if not self._is_parallel:
            return f"calls: {call}"
        between = form.separator if form.separator or form.has_list else form.gap
        if form.body == "pythonic" or form.has_list:
            # the list is inside the call: several are written there
            return f"calls: {call}"
        return f"calls: {call} ({_literal(between) + ' ' if between else ''}{call})*"

    def _call(self) -> str:
        form = self._form
        begin = "" if form.bare else self._delimiter(form.begin)
        end = "" if form.bare else self._delimiter(form.end)
        gap = _literal(form.gap) if form.gap else ""
        self._rules = [f"one: {' | '.join(f'f{i}' for i, _ in self._tools)}", *self._functions()]
        one = "one"
        if form.body == "pythonic" or form.has_list:
            one = '"[" one (", " one)* "]"' if self._is_parallel else '"[" one "]"'
        return " ".join(part for part in (begin, gap, one, gap, end) if part)

    def _functions(self) -> Iterator[str]:
        write = {"json": self._json_call, "xml": self._xml_call, "pythonic": self._python_call}[self._form.body]
        for i, tool in self._tools:
            yield from write(f"f{i}", tool)

    def _json_call(self, rule: str, tool: Tool) -> Iterator[str]:
        key = self._form.argument_keys[0]
        head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
        yield f'{rule}: {_literal(head)} {json_rule(self._schema(tool))} "}}"'

    def _xml_call(self, rule: str, tool: Tool) -> Iterator[str]:
        form, schema = self._form, self._schema(tool)
        parts = []
        for number, (name, property_schema) in enumerate(schema.get("properties", {}).items()):
            value = f"{rule}_{number}"
            begin = _literal(f"{form.parameter_begin}{name}{form.tag_end}\n")
            end = f"\n{form.parameter_end}\n"
            if form.tag_end in name or name != name.strip().strip("\"'"):
                raise InvalidRequest(f"tools: {name[:64]!r} can't be a parameter between tags", param="tools")
            try:
                yield from xml_value(value, property_schema, _definitions(schema), end, is_strict=tool.strict)
            except ValueError as error:
                raise InvalidRequest(f"tools: {tool.name}.{name[:64]}: {error}", param="tools") from None
            part = f"{begin} {value}"
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        head = _literal(f"{form.function_begin}{tool.name}{form.tag_end}\n")
        yield f"{rule}: {' '.join([head, *parts, _literal(form.function_end)])}"

    def _python_call(self, rule: str, tool: Tool) -> Iterator[str]:
        """Arguments in order: the required ones, then any of the others."""
        schema = self._schema(tool)
        properties, required = schema.get("properties", {}), schema.get("required", ())
        parts: list[str] = []
        for number, (name, property_schema) in enumerate(properties.items()):
            if not name.isidentifier():
                raise InvalidRequest(f"tools: {name[:64]!r} can't be an argument of a Python call", param="tools")
            value = f"{rule}_{number}"
            yield f"{value}: {_python_value(property_schema, schema)}"
            if name in required:
                parts.append(f"{_literal((', ' if parts else '') + name + '=')} {value}")
        optional = [
            f"({_literal((', ' if parts else '') + name + '=')} {rule}_{number})?"
            for number, name in enumerate(properties)
            if name not in required
        ]
        # without a required one in front, a second optional one would need a comma that the first may not have
        inside = [*parts, *(optional if parts else optional[:1])]
        yield f"{rule}: {' '.join([_literal(tool.name + '('), *inside, _literal(')')])}"

    def _delimiter(self, text: str) -> str:
        return (self._control(text) or _literal(text)) if text else ""

    def _control(self, text: str) -> str | None:
        """The control token that is spelled so, as the grammar names it."""
        wanted = text.encode()
        found = [i for i in self._vocabulary.control_ids if self._vocabulary.token_bytes[i] == wanted]
        return f"<[{min(found)}]>" if found else None


def _single(text: str, vocabulary: Vocabulary) -> int | None:
    """The token that is spelled so, and that the model's own tokenizer would use."""
    wanted = text.encode()
    special = sorted(vocabulary.control_ids | vocabulary.user_defined_ids)
    return next((i for i in special if vocabulary.token_bytes[i] == wanted), None)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _definitions(root: dict[str, Any]) -> dict[str, Any]:
    """What a property's schema may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _python_value(schema: Any, root: dict[str, Any]) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean" and not _NARROWING & schema.keys():
        return '"True" | "False"'
    return json_rule((schema if isinstance(schema, dict) else {}) | _definitions(root))
