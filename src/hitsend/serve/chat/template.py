"""The checkpoint's own chat template, in a sandbox: messages become one text.

Enters: template source, messages as plain dicts, template arguments. Leaves: the rendered text. Always true: the
template reaches no file, socket, process or Python internals; it can't grow a value or the text past its bounds, and
whatever escapes those bounds (an endless loop, memory) meets the text child's timer and memory limit; what the
template refuses by `raise_exception` is the caller's error (400), anything else is the template's own (500).
Nothing else in hitsend imports jinja2. Next: `marks.py`.
"""

import datetime as dt
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hitsend.core.errors import ConfigError, EngineFailed, InvalidRequest

MAX_STEPS = 5_000_000
"""Attribute reads, calls, operators and range items of one rendering. 1,024 messages need about 50,000."""
MAX_VALUE = 16 * 1024 * 1024
"""Longest text or list that one operation may make."""
MAX_WIDTH = 10_000
"""Widest padding or indentation."""
MAX_BITS = 4096
"""Largest integer."""

_RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token",
    "unk_token", "pad_token", "sep_token", "cls_token", "mask_token", "chat_template", "template", "tokenize",
    "conversation", "conversations", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "tokenizer", "model", "role", "system", "tool_choice", "self",
    "loop", "caller", "varargs", "kwargs", "super", "range", "dict", "lipsum", "cycler", "joiner", "namespace",
    "raise_exception", "strftime_now", "true", "false", "none", "True", "False", "None", "environment", "context",
    "config", "request", "globals", "locals",
})  # fmt: skip
_PROBE = "hitsend probes"
"""A text that no template has of its own."""
_PADDERS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_WIDE = re.compile(r"\d{5,}|\*")
_NESTED = re.compile(r":[^{}]*\{")
_PERCENT = re.compile(r"%[^%a-zA-Z]*")


class _OverLimit(Exception):
    """The template asked for more than it may have."""


class _Refused(Exception):
    """The template called raise_exception."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training: here it is only its contents."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the block's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with every operation counted and every operation that can blow up measured."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            loader=None,
            cache_size=0,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=lambda value: "" if value is None else value,
        )
        self.steps = 0
        self.globals = {
            "range": self._range,
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": dict,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        plain = self.filters
        self.filters = {name: _bounded_filter(name, plain[name]) for name in plain} | {"tojson": _tojson}

    def handle_exception(self, source: str | None = None) -> NoReturn:  # noqa: ARG002  # jinja2's own interface
        """Raise it again. jinja2 would compile code to make the traceback prettier, which the sealed child can't."""
        raise  # noqa: PLE0704  # jinja2 calls this from its except blocks

    def spend(self, steps: int = 1) -> None:
        """Count. Raises _OverLimit."""
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise _OverLimit(f"took more than {MAX_STEPS} steps")

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        self.spend(len(numbers))
        return numbers

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.spend()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.spend()
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.spend()
        _check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend()
        # str.format comes wrapped by jinja2's sandbox
        method = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_method(owner, name, args, kwargs)
        return super().call(context, obj, *args, **kwargs)


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse what would be too large before it is made. Raises _OverLimit."""
    if isinstance(left, str) and operator == "%":
        _check_format(left)
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_length(len(left) + len(right))
    elif operator == "*":
        _check_product(left, right)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
        _check_bits(left.bit_length() * right)


def _check_product(left: Any, right: Any) -> None:
    for several, times in ((left, right), (right, left)):
        if isinstance(several, str | list | tuple) and isinstance(times, int):
            _check_length(len(several) * times)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_length(length: int) -> None:
    if length > MAX_VALUE:
        raise _OverLimit(f"made a value of {length} items, limit {MAX_VALUE}")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise _OverLimit(f"made a number of {bits} bits, limit {MAX_BITS}")


def _check_format(form: str) -> None:
    if any(_WIDE.search(part) for part in _PERCENT.findall(form)):
        raise _OverLimit("used a printf width over 9999")


def _check_widths(values: Sequence[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise _OverLimit(f"asked for a width of {value}, limit {MAX_WIDTH}")


def _check_replace(text: str, args: Sequence[Any]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        times = text.count(args[0]) if args[0] else len(text) + 1
        _check_length(len(text) + times * len(args[1]))


def _check_join(separator: str, items: Any) -> None:
    if isinstance(items, str | list | tuple):
        _check_length(len(separator) * len(items) + sum(len(item) for item in items if isinstance(item, str)))


def _check_method(owner: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Methods of str that can make much out of little. Raises _OverLimit."""
    if name in _PADDERS:
        _check_widths([*args, *kwargs.values()])
    elif name == "replace":
        _check_replace(owner, args)
    elif name == "join" and args:
        _check_join(owner, args[0])
    elif name in {"format", "format_map"} and (_WIDE.search(owner) or _NESTED.search(owner)):
        raise _OverLimit("used a format width that is over 9999 or not written out")


def _bounded_filter(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """The same filter with its arguments measured; most filters can't grow anything and stay as they are."""
    checks: dict[str, Callable[[Sequence[Any]], None]] = {
        "center": lambda args: _check_widths(args[1:]),
        "indent": lambda args: _check_widths(args[1:]),
        "batch": lambda args: _check_widths(args[1:2]),
        "slice": lambda args: _check_widths(args[1:2]),
        "round": lambda args: _check_widths(args[1:2]),
        "format": lambda args: _check_format(str(args[0])),
    }
    if name == "replace":

        def replace(eval_ctx: Any, text: str, *args: Any, **kwargs: Any) -> Any:
            _check_replace(str(text), args)
            return plain(eval_ctx, text, *args, **kwargs)

        return jinja2.pass_eval_context(replace)
    check = checks.get(name)
    if check is None:
        return plain

    def bounded(*args: Any, **kwargs: Any) -> Any:
        check([*args, *kwargs.values()])
        return plain(*args, **kwargs)

    return bounded


def _raise_exception(message: Any) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3,}", form):
        raise _OverLimit("used a date format that is too long")
    return dt.datetime.now().strftime(form)  # noqa: DTZ005  # templates mean the machine's own date


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # the names and order that templates use
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    if (isinstance(indent, int) and indent > 16) or (isinstance(indent, str) and len(indent) > 16):
        raise _OverLimit("used a JSON indentation over 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One compiled template. `special_tokens` are the variables bos_token, eos_token… that templates print."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], max_chars: int) -> None:
        self._sandbox = _Sandbox()
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self.source = source
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        try:
            tree = self._sandbox.parse(source)
            _refuse_loading(tree)
            variables = frozenset(meta.find_undeclared_variables(tree))
            self.variables, self.uses_tools = variables - _RESERVED, "tools" in variables
            self.prints_calls = "tool_calls" in source
            self._compiled = self._sandbox.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template can't be compiled: {error}") from error

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it looks for parts in contents, and for nothing else: a text would get lost without a word."""
        asked = {"role": "user", "content": _PROBE}
        return "type" in self.source and not self._prints(asked) and self._prints(_in_parts(asked))

    @cached_property
    def takes_system(self) -> bool:
        """Whether it prints a system message: some refuse one, some pass over it."""
        return self._prints(*self._fitted([{"role": "system", "content": _PROBE}, {"role": "user", "content": "?"}]))

    def _fitted(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return [_in_parts(message) for message in messages] if self._takes_parts else messages

    def _prints(self, *messages: Mapping[str, Any]) -> bool:
        try:
            return _PROBE in self._rendered(messages, {}, add_generation_prompt=True)
        except (InvalidRequest, EngineFailed):
            return False

    def check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that are hitsend's own or that this template doesn't read. Raises InvalidRequest."""
        for name in arguments:
            param = f"chat_template_kwargs.{name}"[:100]
            if name in _RESERVED:
                raise InvalidRequest(f"{param} is set by the server and can't be sent", param=param)
            if name not in self.variables and name != "enable_thinking":
                known = ", ".join(sorted(self.variables | {"enable_thinking"}))
                raise InvalidRequest(f"{param}: this model's chat template reads only {known}", param=param)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt's text. Raises InvalidRequest for what the template refuses, EngineFailed for what it can't do."""
        messages = self._fitted(messages)
        return self._rendered(messages, arguments, add_generation_prompt=add_generation_prompt, tools=tools)

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        self._sandbox.steps = 0
        variables = self._special_tokens | {
            **arguments,
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._collect(variables)
        except _Refused as refusal:
            reason = str(refusal)[:500]
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from None
        except _OverLimit as excess:
            raise EngineFailed(f"the model's chat template {excess}") from None
        except (SecurityError, OSError) as breach:
            raise EngineFailed(f"the model's chat template tried to leave its sandbox: {breach}") from None
        except MemoryError:
            raise EngineFailed("the model's chat template used more memory than the text process may have") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            kind = type(error).__name__
            raise EngineFailed(f"the model's chat template failed on these messages ({kind})") from error
        except RecursionError:
            raise EngineFailed("the model's chat template recursed too deeply") from None

    def _collect(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_chars
        for piece in self._compiled.generate(variables):
            room -= len(piece)
            if room < 0:
                raise _OverLimit(f"printed more than {self._max_chars} characters")
            pieces.append(piece)
        return "".join(pieces)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _refuse_loading(tree: nodes.Template) -> None:
    for tag in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends):
        if next(tree.find_all(tag), None) is not None:
            raise ConfigError(f"the model's chat template uses {{% {tag.__name__.lower()} %}}, which reads files")


def thinking_default(template: ChatTemplate) -> bool | None:
    """Whether the template lets the model think when nobody says; None where `enable_thinking` changes nothing."""
    if "enable_thinking" not in template.variables:
        return None

    def shown(**arguments: bool) -> str:
        question = [{"role": "user", "content": "?"}]
        return template.render(question, arguments, add_generation_prompt=True)

    try:
        silent, on, off = shown(), shown(enable_thinking=True), shown(enable_thinking=False)
    except (InvalidRequest, EngineFailed):
        return None
    return None if on == off else silent == on
