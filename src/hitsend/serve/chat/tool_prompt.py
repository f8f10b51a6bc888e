"""Tools in a prompt: as templates expect them, or in our own words where a template knows none.

Enters: a request's tools; messages as the template will see them. Leaves: the same with tools. Always true: texts that
came from the client are marked before they come here, and only what is written here can become a control token; a
template that prints tools is never interfered with. Next: `../engine/models.py`.
"""

import json
from collections.abc import Sequence
from typing import Any

from hitsend.core.request import Request
from hitsend.core.tool_format import HERMES

_ASKING = (
    "You can call functions. Each line between <tools> and </tools> describes one:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, write exactly this and nothing after it, with the function's own name and arguments:\n"
    '{begin}\n{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}\n{end}\n'
    "Write it once more for each further call. The results come between <tool_response> and </tool_response>. "
    "Where no function helps, just answer."
)


def offered_tools(request: Request) -> tuple[dict[str, Any], ...]:
    """The tools as templates know them; none where the client forbids calls."""
    if request.tool_choice.mode == "none":
        return ()
    found = []
    for tool in request.tools:
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
        found.append({"type": "function", "function": function})
    return tuple(found)


def write_turns(messages: list[dict[str, Any]]) -> list[int]:
    """Write calls and results of the history as plain turns, for a template that would leave them out.

    Results that follow each other, and what the user says beside them, are one turn: many of these templates want user
    and assistant to alternate. Returns the message that each turn begins with.
    """
    begins: list[int] = []
    has_result = False
    for index, message in enumerate(messages):
        is_result = message["role"] == "tool"
        _write_turn(message)
        last = messages[begins[-1]] if begins else {"role": ""}
        if message["role"] == last["role"] == "user" and (is_result or has_result):
            last["content"] += f"\n{message['content']}"
            has_result = True
        else:
            begins.append(index)
            has_result = is_result
    messages[:] = [messages[index] for index in begins]
    return begins


def write_tools(messages: list[dict[str, Any]], tools: Sequence[Any], *, takes_system: bool) -> int:
    """Describe the tools in the system message, or in the first message where the template knows no such role.

    Returns how many messages were put in front (0 or 1).
    """
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _ASKING.format(tools=lines, begin=HERMES.begin, end=HERMES.end)
    content = messages[0]["content"] if messages else ""
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{content}\n\n{words}" if content else words
        return 0
    if messages and not takes_system:
        messages[0]["content"] = f"{words}\n\n{content}"
        return 0
    messages.insert(0, {"role": "system", "content": words})
    return 1


def _write_turn(message: dict[str, Any]) -> None:
    if message["role"] == "tool":
        message["role"] = "user"
        message["content"] = f"<tool_response>\n{message['content']}\n</tool_response>"
    for call in message.get("tool_calls") or ():
        written = json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False
        )
        before = f"{message['content']}\n" if message["content"] else ""
        message["content"] = f"{before}{HERMES.begin}\n{written}\n{HERMES.end}"
