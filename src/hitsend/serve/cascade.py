"""Judging a draft: whether a cheap engine's answer may be sent, or a better one has to be asked.

Enters: the question, the draft's text and log-probabilities, and the route's rules. Leaves: a `Verdict`. Always true:
every rule that is set must accept; a rule that can't tell (no log-probabilities came, the judge failed, the code raised
or took too long) rejects; the code that runs is the one that the settings name, and nothing of a request can name
another. Next: `routed.py`.
"""

import asyncio
import importlib
import json
import logging
import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.core.request import Message, Request, SamplingAsked
from hitsend.serve.aside import Asides
from hitsend.serve.candidates import able_request
from hitsend.serve.verdicts import Busy, Code, CodeThreads, Raised, TooLong, full_match
from hitsend.settings import CascadeSettings, RouteSettings

_log = logging.getLogger(__name__)

JUDGE_TOKENS = 8
_ASK = "Question:\n{question}\n\nAnswer:\n{answer}\n\nIs the answer right and complete? Reply with one word, yes or no."
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KNOWN = {"type", "enum", "const", "required", "properties", "items", "additionalProperties"}
_SHAPES: dict[str, Any] = {"type": str | list, "enum": list, "required": list, "properties": dict}
_NAMES = {str | list: "a type or a list of them", list: "a list", dict: "an object"}
_SAID = {"$schema", "$id", "title", "description", "default", "examples"}

_YES = re.compile(r"\W*yes\b", re.IGNORECASE)


class Draft(msgspec.Struct, frozen=True):
    """A cheap engine's answer. `logprobs`: of its tokens, as far as they came; `calls`: (name, arguments) of each."""

    text: str
    logprobs: tuple[float, ...]
    is_whole: bool
    calls: tuple[tuple[str, str], ...] = ()

    @property
    def shown(self) -> str:
        """To who judges by reading: its text, and its calls as JSON, a line each."""
        calls = (json.dumps({"call": name, "arguments": said}, ensure_ascii=False) for name, said in self.calls)
        return "\n".join(filter(None, (self.text, *calls)))

    @property
    def mean_logprob(self) -> float | None:
        """The confidence that `min_logprob` asks for."""
        return fmean(self.logprobs) if self.logprobs else None


class Verdict(msgspec.Struct, frozen=True):
    """`verdicts`: each rule's words, `ok` first where it accepts. `judge_microusd`: what asking the judge cost."""

    accepted: bool
    verdicts: dict[str, str]
    judge_microusd: int = 0


class Scorers:
    """One route's rules, ready to be applied. Raises ConfigError for what can't be applied."""

    def __init__(self, route: RouteSettings, judge: str | None) -> None:
        """`judge`: the served model that the route's judge is."""
        rule = route.cascade
        where = f"routes[{route.model}].cascade"
        self._route = route.model
        self._rule = rule
        self._judge = judge
        self._threads = CodeThreads()
        self._unthinking = msgspec.structs.replace(route, thinking="off")
        self._pattern = None if rule.regex is None else re.compile(rule.regex, re.DOTALL)
        self._schema = None if rule.schema is None else _schema(rule, where)
        self._code = None if rule.code is None else load_code(rule.code, where)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the draft has to come with them."""
        return self._rule.min_logprob is not None

    async def judge(self, request: Request, draft: Draft, asides: Asides, number: int = 1) -> Verdict:
        """All rules, cheapest first; what is dear isn't asked once one has rejected. `number`: which of this request's
        verdicts it is."""
        said = self._at_once(draft)
        cost = 0
        if self._code is not None and _accepts(said):
            said["code"] = await self._by_code(self._code, question_of(request), draft.shown)
        if self._judge is not None and _accepts(said):
            said["judge"], cost = await self._by_judge(request, draft.shown, asides, number)
        return Verdict(_accepts(said), said, cost)

    def _at_once(self, draft: Draft) -> dict[str, str]:
        said: dict[str, str] = {} if draft.is_whole else {"length": "rejected: cut off by its token limit"}
        least, mean = self._rule.min_logprob, draft.mean_logprob
        if least is not None:
            is_sure = mean is not None and mean >= least
            text = "none came" if mean is None else f"{mean:.4f}, least {least}"
            said["min_logprob"] = f"{'ok' if is_sure else 'rejected'}: {text}"
        if self._pattern is not None:
            said["regex"] = _by_regex(self._pattern, draft.text)
        if self._schema is not None:
            fault = json_fault(draft.text, self._schema)
            said["schema"] = "ok" if fault is None else f"rejected: {fault}"
        return said

    async def _by_code(self, code: Code, question: str, answer: str) -> str:
        try:
            async with asyncio.timeout(self._rule.code_timeout_s):
                found = await self._threads.call(code, question, answer)
        except TimeoutError:
            return f"rejected: no verdict in {self._rule.code_timeout_s} s"
        except Busy:
            _log.error("route %s: %s isn't called: too many calls never came back", self._route, self._rule.code)
            return "rejected: not called, too many calls never came back"
        except Raised as error:
            _log.warning("route %s: %s raised %s", self._route, self._rule.code, error)
            return f"rejected: raised {error}"
        return "ok" if found is True else "rejected"

    async def _by_judge(self, request: Request, answer: str, asides: Asides, number: int) -> tuple[str, int]:
        assert self._judge is not None
        asked = Request(
            request_id=request.request_id,
            model=self._judge,
            messages=(Message("user", _ASK.format(question=question_of(request), answer=answer)),),
            principal=request.principal,
            sampling=SamplingAsked(temperature=0.0),
            max_tokens=JUDGE_TOKENS,
        )
        # thoughts would take the few tokens that it has for its word
        asked = able_request(asked, self._unthinking, self._judge, asides.stages)
        found = await asides.ask(asked, "judge" if number == 1 else f"judge/{number}", self._route)
        if found.error is not None:
            return f"rejected: the judge failed ({found.error})", found.cost_microusd
        return ("ok" if says_yes(found.text) else "rejected: the judge did not say yes"), found.cost_microusd


def _by_regex(pattern: re.Pattern[str], text: str) -> str:
    try:
        return "ok" if full_match(pattern, text) else "rejected: no match"
    except TooLong:
        return "rejected: the pattern takes too long"


def says_yes(text: str) -> bool:
    """Whether a judge's first word is yes, whatever stands around that: `**Yes**` is one, `yesterday` none."""
    return _YES.match(text) is not None


def question_of(request: Request) -> str:
    """The last message's text, or the prompts that stand for it."""
    if request.messages:
        content = request.messages[-1].content
        return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return "\n".join(prompt for prompt in request.prompts if isinstance(prompt, str))


def load_code(named: str, where: str) -> Code:
    """`module:function`. Raises ConfigError."""
    module, colon, function = named.partition(":")
    try:
        code = getattr(importlib.import_module(module), function) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}.code: {named!r} can't be imported ({error})") from error
    if not callable(code):
        raise ConfigError(f"{where}.code: {named!r}, expected module:function")
    found: Code = code
    return found


def json_fault(text: str, schema: Any) -> str | None:
    """Why a text isn't JSON of this schema, None where it is."""
    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):  # what a model writes may be as deep as it is long
        return "not JSON"
    return value_fault(value, schema, "$")


def _no_json(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity, which Python reads and others don't


def value_fault(value: Any, schema: Any, at: str) -> str | None:
    """The first place at which a value isn't what the schema says."""
    if isinstance(schema, bool):
        return None if schema else f"{at} may not be there"
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return f"{at} is not {' or '.join(kinds)}"
    if not _is_listed(value, schema):
        return f"{at} is not one of the values"
    if isinstance(value, dict):
        return _object_fault(value, schema, at)
    items = schema.get("items")
    if isinstance(value, list) and items is not None:
        return next(filter(None, (value_fault(one, items, f"{at}[{i}]") for i, one in enumerate(value))), None)
    return None


def _object_fault(value: dict[str, Any], schema: Any, at: str) -> str | None:
    inner = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{at}.{missing[0]} is missing"
    for name, one in value.items():
        fault = value_fault(one, inner.get(name, schema.get("additionalProperties", True)), f"{at}.{name}")
        if fault is not None:
            return fault
    return None


def _is_listed(value: Any, schema: Any) -> bool:
    is_one = "enum" not in schema or any(_is_same(value, one) for one in schema["enum"])
    return is_one and ("const" not in schema or _is_same(value, schema["const"]))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other  # to Python true is 1
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _schema(rule: CascadeSettings, where: str) -> Any:
    """The schema, checked for what would otherwise be passed over. Raises ConfigError."""
    assert rule.schema is not None
    if rule.schema == "json":
        return True
    try:
        schema = json.loads(rule.schema)
        _check_schema(schema, f"{where}.schema")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}.schema: neither `json` nor a JSON schema ({error})") from error
    return schema


def _check_schema(schema: Any, where: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ConfigError(f"{where}: expected an object")
    unknown = sorted(schema.keys() - _KNOWN - _SAID)
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]!r} is not checked here, only {', '.join(sorted(_KNOWN))}")
    for word, kind in _SHAPES.items():
        if word in schema and not isinstance(schema[word], kind):
            raise ConfigError(f"{where}.{word}: expected {_NAMES[kind]}")
    kinds = schema.get("type", ())
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise ConfigError(f"{where}.type: {kind!r}, expected one of {', '.join(_TYPES)}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise ConfigError(f"{where}.required: expected names")
    inner: Sequence[Any] = (
        *schema.get("properties", {}).values(),
        *(schema[name] for name in ("items", "additionalProperties") if name in schema),
    )
    for one in inner:
        _check_schema(one, where)


def _accepts(said: dict[str, str]) -> bool:
    return all(words.startswith("ok") for words in said.values())
