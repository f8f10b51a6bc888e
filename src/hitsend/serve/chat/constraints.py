"""What a request's answer is held to, as a grammar: an output format, calls that must come, or either of them.

Enters: a `Request`'s wishes, and how this model writes calls. Leaves: a `GrammarSource` for the text child to compile,
or None where the answer is free. Always true: what is forced is what the parsers in `output/` read, because both come
from one `ToolFormat`; a delimiter that is a control token of this model is forced as that token, never spelled; calls
that nobody forces stay free (`tool_choice` auto without strict). Next: `text.py`.

    tool_choice required, or named    one call, or several where parallel calls are allowed; nothing else
    auto, and a tool is strict        any text; a call that begins has to be a valid one
    auto, and an output format        either calls or the formatted answer
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from hitsend.core.constraint import WHITESPACE, GrammarSource
from hitsend.core.errors import InvalidRequest
from hitsend.core.request import OutputFormat, Request, Tool, ToolChoice
from hitsend.core.tool_format import ToolFormat
from hitsend.core.vocabulary import Vocabulary

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
        self._is_parallel = is_parallel
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
            line = f"answer: {_json(schema)}"
        elif answer.kind == "choice":
            line = "answer: " + " | ".join(_literal(each) for each in answer.value)
        elif answer.kind == "regex":
            line = f"answer: /{answer.value.replace('/', chr(92) + '/')}/"
        else:
            text = "a Lark grammar can't be combined with tools; set tool_choice to none"
            raise InvalidRequest(f"structured_outputs: {text}", param="structured_outputs")
        return self._source("start: calls | answer", self._calls(), line, schemas=schemas)

    def when_begun(self) -> GrammarSource:
        """Any text, and valid calls in it."""
        form = self._form
        call = self._call()
        if form.begin and (token := self._control(form.begin)) is not None:
            rest = call.removeprefix(token)
            return self._source(f"start: text ({token} rest text)*", f"rest: {rest}", f"text: {_ANY_TEXT}")
        if form.bare:
            text = rf"text: /([^\s{re.escape(form.bare)}](.|\n)*)?/"
            return self._source("start: calls | text", self._calls(), text)
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
        yield f'{rule}: {_literal(head)} {_json(self._schema(tool))} "}}"'

    def _xml_call(self, rule: str, tool: Tool) -> Iterator[str]:
        form, schema = self._form, self._schema(tool)
        parts = []
        for number, (name, property_schema) in enumerate(schema.get("properties", {}).items()):
            value = f"{rule}_{number}"
            begin = _literal(f"{form.parameter_begin}{name}{form.tag_end}\n")
            end = f"\n{form.parameter_end}\n"
            if _is_plain_text(property_schema):
                yield f"{value}[suffix={_literal(end)}]: {_ANY_TEXT}"
                part = f"{begin} {value}"
            else:
                yield f"{value}: {_xml_value(property_schema, schema)}"
                part = f"{begin} {value} {_literal(end)}"
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


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: dict[str, Any]) -> str:
    options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps(schema | {"x-guidance": options})


def _inside(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A property's schema on its own, with the definitions that it may refer to."""
    own = schema if isinstance(schema, dict) else {}
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**own, **shared}


def _is_plain_text(schema: Any) -> bool:
    limiting = ("enum", "const", "pattern", "format", "anyOf", "oneOf", "allOf", "minLength", "maxLength")
    return isinstance(schema, dict) and schema.get("type") == "string" and not any(key in schema for key in limiting)


def _xml_value(schema: Any, root: dict[str, Any]) -> str:
    """Texts stand without quotes there; everything else is JSON."""
    if isinstance(schema, dict):
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        if values and all(isinstance(value, str) for value in values):
            return " | ".join(_literal(value) for value in values)
        if schema.get("type") == "string" and isinstance(schema.get("pattern"), str):
            pattern = schema["pattern"].removeprefix("^").removesuffix("$").replace("/", "\\/")
            return f"/{pattern}/"
    return _json(_inside(schema, root))


def _python_value(schema: Any, root: dict[str, Any]) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean":
        return '"True" | "False"'
    return _json(_inside(schema, root))
