"""How models write calls and thoughts: delimiters as data.

Enters: nothing. Leaves: `TOOL_FORMATS` and `REASONING_FORMATS` by name. Always true: no code here knows a model; the
parsers in `serve/output/` and the grammars read the same values, so what is forced is what is understood.
Next: `vocabulary.py`.

    hermes    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>
    xml       <tool_call><function=f><parameter=a>\\n1\\n</parameter></function></tool_call>
    llama3    {"name": "f", "parameters": {"a": 1}}                 perhaps behind <|python_tag|>, more behind ;
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]    or [TOOL_CALLS]f[ARGS]{"a": 1}, f{"a": 1}
    pythonic  [f(a=1), g()]                                         perhaps inside <|python_start|>…<|python_end|>
"""

from typing import Literal

import msgspec


class ToolFormat(msgspec.Struct, frozen=True):
    """One way to write calls. An empty string means that the format has no such thing.

    `begin`…`end` enclose a call (`gap` stands inside both, as templates write it; readers allow any blanks there).
    `bare` is the character that opens a call without `begin`, but only as the first one of the answer that isn't blank;
    `function_begin` opens one without `begin` anywhere, where it goes on with a function that was offered.
    `body`: a JSON object with the keys `name` and one of `argument_keys` (the first one is written, all are read); XML
    parameters; or Python calls in a list. `has_list`: JSON objects may stand in an array. `separator`: what may stand
    between two calls of one `begin`. `arguments_begin`: what parts a bare name from its JSON arguments.
    """

    name: str
    body: Literal["json", "xml", "pythonic"]
    begin: str = ""
    end: str = ""
    gap: str = ""
    bare: str = ""
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    has_list: bool = False
    separator: str = ""
    arguments_begin: str = ""
    function_begin: str = ""
    function_end: str = ""
    parameter_begin: str = ""
    parameter_end: str = ""
    tag_end: str = ""


class ReasoningFormat(msgspec.Struct, frozen=True):
    """Thoughts stand between `begin` and `end`; templates may have written `begin` already."""

    name: str
    begin: str
    end: str


HERMES = ToolFormat("hermes", "json", begin="<tool_call>", end="</tool_call>", gap="\n")
XML = ToolFormat(
    "xml",
    "xml",
    begin="<tool_call>",
    end="</tool_call>",
    gap="\n",
    function_begin="<function=",
    function_end="</function>",
    parameter_begin="<parameter=",
    parameter_end="</parameter>",
    tag_end=">",
)
LLAMA3 = ToolFormat(
    "llama3", "json", begin="<|python_tag|>", bare="{", argument_keys=("parameters", "arguments"), separator=";"
)
MISTRAL = ToolFormat("mistral", "json", begin="[TOOL_CALLS]", has_list=True, arguments_begin="[ARGS]")
PYTHONIC = ToolFormat("pythonic", "pythonic", begin="<|python_start|>", end="<|python_end|>", bare="[", separator=",")

TOOL_FORMATS: dict[str, ToolFormat] = {known.name: known for known in (HERMES, XML, LLAMA3, MISTRAL, PYTHONIC)}

THINK = ReasoningFormat("think", "<think>", "</think>")
REASONING_FORMATS: dict[str, ReasoningFormat] = {
    known.name: known
    for known in (
        THINK,
        ReasoningFormat("brackets", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    )
}
