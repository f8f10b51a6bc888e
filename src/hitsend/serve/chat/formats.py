"""How this checkpoint writes calls and thoughts, and what that means for one request.

Enters: the template's source, special spellings, names, the `[[models]]` settings. Leaves: `Formats`, and requests that
suit the checkpoint, or an InvalidRequest. Always true: recognising is looking for fixed words, in an order in which the
more telling ones come first; settings win; what isn't recognised stays text, with a warning, and is never guessed from
the output.
Next: `tool_prompt.py`.
"""

from collections.abc import Container, Iterable

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Request
from hitsend.core.tool_format import HERMES, REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from hitsend.serve.chat.presets import matching
from hitsend.serve.chat.prompt import TextFacts
from hitsend.settings import ModelSettings

_TOOL_WORDS = (
    ("<arg_key>", None),  # a way to write calls that no parser here reads, with delimiters of one that is
    ("<function=", "xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary', "llama3"),
)
_TOOL_NAMES = (
    ("coder", "xml"),
    ("qwen", "hermes"),
    ("hermes", "hermes"),
    ("mistral", "mistral"),
    ("llama", "llama3"),
)


class Formats(msgspec.Struct, frozen=True):
    """One model's; None where calls or thoughts stay text."""

    tool: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def recognised_tool_format(template: str, name: str) -> str | None:
    """From the template's words; where it prints tools but shows no way to write calls, from the model's name."""
    for word, found in _TOOL_WORDS:
        if word in template:
            return found
    if "tools" not in template:
        return None
    return next((found for word, found in _TOOL_NAMES if word in name.lower()), None)


def recognised_reasoning_format(template: str, spellings: Container[str]) -> str | None:
    """From the template's words, or from a vocabulary that has both tags."""
    for name, form in REASONING_FORMATS.items():
        if form.end in template or (form.begin in spellings and form.end in spellings):
            return name
    return None


def resolve_formats(names: Iterable[str], facts: TextFacts, settings: tuple[ModelSettings, ...]) -> Formats:
    """Settings first, then what was recognised. A template that prints no tools gets our own words, so Hermes' form."""
    chosen = matching(settings, names)
    tool = next((model.tool_format for model in chosen if model.tool_format is not None), facts.tool_format)
    reasoning = next(
        (model.reasoning_format for model in chosen if model.reasoning_format is not None), facts.reasoning_format
    )
    if not facts.uses_tools and tool != "none":
        tool = HERMES.name
    return Formats(TOOL_FORMATS.get(tool or "none"), REASONING_FORMATS.get(reasoning or "none"))


def suited(request: Request, facts: TextFacts, formats: Formats) -> Request:
    """The request with its reasoning effort in this template's own terms, and warnings for what has no effect here."""
    arguments, warnings = dict(request.template_kwargs), list(request.warnings)
    effort = request.reasoning_effort
    if effort is not None:
        has_effect = False
        if facts.thinking_default is not None:
            arguments.setdefault("enable_thinking", effort != "none")
            has_effect = True
        if "reasoning_effort" in facts.template_variables:
            arguments.setdefault("reasoning_effort", effort)
            has_effect = True
        if not has_effect:
            field = "reasoning_effort" + (" (thinking)" if "enable_thinking" in request.template_kwargs else "")
            warnings.append(f"{field}: accepted without effect: this model's template doesn't know it")
    if request.thinking_token_budget is not None and formats.reasoning is None:
        warnings.append("thinking_token_budget: accepted without effect: this model doesn't think")
    if request.tools and request.tool_choice.mode != "none":
        if formats.tool is None:
            _refuse_force(request)
        if not facts.uses_tools:
            warnings.append("tools: this model's template doesn't know tools; they were described in the first message")
        if formats.tool is None:
            warnings.append("tools: how this model writes calls is not known; calls stay text")
    return msgspec.structs.replace(request, template_kwargs=arguments, warnings=tuple(warnings))


def _refuse_force(request: Request) -> None:
    """A call can only be forced in a form that is known. Raises InvalidRequest."""
    field = "tool_choice" if request.tool_choice.mode == "required" else None
    if field is None:
        strict = next((index for index, tool in enumerate(request.tools) if tool.strict), None)
        field = None if strict is None else f"tools[{strict}].function.strict"
    if field is not None:
        text = "how this model writes calls is not known, so none can be forced ([[models]] tool_format names it)"
        raise InvalidRequest(f"{field}: {text}", param=field)


def is_thinking_open(request: Request, prompt_tail: bytes, formats: Formats) -> bool:
    """Whether the prompt ends inside thoughts: its last words are the begin tag, or the continued message's are."""
    form = formats.reasoning
    if form is None:
        return False
    if request.continue_final_message:
        words = request.messages[-1].content or ""
        return words.rfind(form.begin) > words.rfind(form.end)
    return prompt_tail.decode("utf-8", "replace").rstrip().endswith(form.begin)
