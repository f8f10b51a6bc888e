"""A request's messages become prompt token ids: the work of the text child, and the words spoken with it.

Enters: `Prepare` (messages, template arguments, how the prompt shall end). Leaves: `Prompt` (ids, where each message
lies in them, times) or a `Refused`. Always true: null content is empty content, text is marked before the template sees
it, and the message spans come from a second rendering that must equal the first one but for its anchors: where a
template looks too closely at its text for that, there are no spans, never a different prompt.
Next: `text.py`, the edge's side.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import InvalidRequest
from hitsend.core.events import Rendered, Tokenized, TokenSpan
from hitsend.core.request import Message
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.arguments import escaped_calls, with_parsed_arguments, with_printable_arguments
from hitsend.serve.chat.checkpoint import CheckpointFiles
from hitsend.serve.chat.grammars import CheckGrammar, Grammar
from hitsend.serve.chat.marks import (
    Marks,
    Spellings,
    anchor_position,
    choose_marks,
    mark_text,
    mark_value,
    texts_in,
)
from hitsend.serve.chat.spans import anchored_message, find_spans
from hitsend.serve.chat.template import ChatTemplate
from hitsend.serve.chat.tokenizer import VocabularyTokenizer, token_range
from hitsend.serve.chat.tool_prompt import write_tools, write_turns

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_SHORT = 32


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The edge's first message: what to load. `template` overrides the checkpoint's own; times in seconds of CPU.

    With `checkpoint`, prompts are only counted: no model's file is read.
    """

    model_path: str
    libllama: str | None
    template: str | None
    render_timeout_s: float
    tokenize_timeout_s: float
    max_prompt_bytes: int
    wants_table: bool
    checkpoint: CheckpointFiles | None = None


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Turn messages into a prompt. `wants_text` asks for the rendered text too.

    A prompt of more than `max_prompt_tokens` comes back without its ids: it will be refused for its length. Where
    `only_counts`, nobody wants more than their number: it comes without ids and spans.
    """

    messages: tuple[Message, ...]
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    wants_text: bool = False
    max_prompt_tokens: int | None = None
    tools: tuple[dict[str, Any], ...] = ()
    only_counts: bool = False


class TokenizeText(msgspec.Struct, frozen=True, tag="tokenize"):
    """Turn somebody's text into ids."""

    text: str
    add_special: bool = False
    parse_special: bool = False


Order = Open | Prepare | TokenizeText | CheckGrammar


class TextFacts(msgspec.Struct, frozen=True):
    """What the text child found in the file. `thinking_default` None: `enable_thinking` changes nothing here.

    `uses_tools`: the template prints tools itself. The formats are names of `core/tool_format.py`. `words`: see
    `LoadedModel.words_id`.
    """

    metadata: dict[str, str]
    template_sha256: str
    template_variables: tuple[str, ...]
    thinking_default: bool | None
    tool_format: str | None = None
    reasoning_format: str | None = None
    uses_tools: bool = False
    words: str = ""


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The child is ready. The table comes once, with the first start."""

    facts: TextFacts
    vocabulary: Vocabulary | None


class Prompt(msgspec.Struct, frozen=True, tag="prompt"):
    """A prompt, ready for an engine. Instants are `Clock.now()` seconds; `text` only where it was asked for.

    `prompt_token_ids` has `num_tokens` ids, or none where there were more than `Prepare.max_prompt_tokens`.
    """

    prompt_token_ids: tuple[int, ...]
    num_tokens: int
    num_control_tokens: int
    spans: tuple[TokenSpan, ...]
    num_chars: int
    template_sha256: str
    render_started_at: float
    render_ended_at: float
    tokenize_started_at: float
    tokenize_ended_at: float
    text: str | None = None

    def rendered(self, template_kwargs: Mapping[str, Any]) -> Rendered:
        """The event. Longer texts among the template's arguments are shown only where text is captured."""
        return Rendered(
            started_at=self.render_started_at,
            ended_at=self.render_ended_at,
            template_sha256=self.template_sha256,
            num_chars=self.num_chars,
            template_kwargs=dict(template_kwargs) if self.text is not None else _shown(template_kwargs),
            text=self.text,
        )

    def tokenized(self) -> Tokenized:
        """The event; the ids are in it only where text is captured."""
        return Tokenized(
            started_at=self.tokenize_started_at,
            ended_at=self.tokenize_ended_at,
            num_tokens=self.num_tokens,
            num_control_tokens=self.num_control_tokens,
            spans=self.spans,
            prompt_token_ids=self.prompt_token_ids if self.text is not None else None,
        )


class TokenIds(msgspec.Struct, frozen=True, tag="token_ids"):
    """The answer to TokenizeText."""

    token_ids: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A ServeError on its way to the edge."""

    code: str
    message: str
    param: str | None = None


class NotOpened(msgspec.Struct, frozen=True, tag="not_opened"):
    """A ConfigError on its way to the edge."""

    message: str


Answer = Opened | Prompt | TokenIds | Grammar | Refused | NotOpened


def _shown(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, bool | int | float | None) else "…" for name, value in arguments.items()}


class Composer:
    """Renders and tokenises, one request at a time. `as_is`: as servers do that change nothing in messages."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: VocabularyTokenizer,
        clock: Clock,
        max_bytes: int,
        *,
        as_is: bool = False,
    ) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._spellings: Spellings = tokenizer.spellings
        self._clock = clock
        self._max_bytes = max_bytes
        self._knows_developer = as_is or "developer" in template.source
        self._writes_tools = not (as_is or template.uses_tools)

    def render(self, order: Prepare) -> "Text":
        """The prompt's text, marks and all. Raises InvalidRequest, EngineFailed."""
        started_at = self._clock.now()
        self._check(order)
        marks = choose_marks([self._template.source, *_all_texts(order), *texts_in(escaped_calls(order.messages))])
        arguments = mark_value(order.template_kwargs, self._spellings.every, marks.cut)
        messages = [self._template_message(message, marks) for message in order.messages]
        tools = [mark_value(tool, self._spellings.every, marks.cut) for tool in order.tools]
        begins, inserted = list(range(len(messages))), 0
        if self._writes_tools:
            has_calls = any(message.get("tool_calls") for message in messages)
            if tools or (has_calls and not self._template.prints_calls):
                begins = write_turns(messages)
            inserted = write_tools(messages, tools, takes_system=self._template.takes_system) if tools else 0
        if order.continue_final_message:
            messages[-1]["content"] += marks.end
        prompt = order.add_generation_prompt and not order.continue_final_message
        printed = partial(self._template.render, arguments=arguments, add_generation_prompt=prompt, tools=tools)
        try:
            text = printed(messages)
            found = [] if order.only_counts else self._spans(text, messages, marks, printed)
        except InvalidRequest as refusal:
            # the template's own words may quote a message
            raise InvalidRequest(marks.drop(refusal.message), param=refusal.param) from None
        spans = [(begins[index - inserted], start, end) for index, start, end in found if index >= inserted]
        if order.continue_final_message:
            text = _cut_at_end(text, marks)
        size = len(marks.drop(text).encode())
        if size > self._max_bytes:
            raise InvalidRequest(
                f"the rendered prompt has {size} bytes, limit {self._max_bytes} (chat.max_prompt_bytes)",
                param="messages",
            )
        return Text(text, marks, tuple(span for span in spans if span[2] <= len(text)), started_at, self._clock.now())

    def tokenize(self, text: "Text", order: Prepare) -> Prompt:
        """The prompt's ids. Raises EngineFailed."""
        started_at = self._clock.now()
        encoded = self._tokenizer.encode_prompt(text.marked, text.marks)
        spans: list[TokenSpan] = []
        for index, start, end in text.spans:
            found = token_range(
                encoded, text.marked, start, end, marks=text.marks, vocabulary=self._tokenizer.vocabulary
            )
            spans.append(TokenSpan(index, order.messages[index].role, found.start, found.stop))
        plain = text.marks.drop(text.marked)
        num_tokens = len(encoded.token_ids)
        fits = order.max_prompt_tokens is None or num_tokens <= order.max_prompt_tokens
        fits = fits and not order.only_counts
        return Prompt(
            prompt_token_ids=encoded.token_ids if fits else (),
            num_tokens=num_tokens,
            num_control_tokens=encoded.num_control_tokens,
            spans=tuple(spans),
            num_chars=len(plain),
            template_sha256=self._template.sha256,
            render_started_at=text.started_at,
            render_ended_at=text.ended_at,
            tokenize_started_at=started_at,
            tokenize_ended_at=self._clock.now(),
            text=plain if order.wants_text else None,
        )

    def _check(self, order: Prepare) -> None:
        if not order.messages:
            raise InvalidRequest("messages must have at least one message", param="messages")
        for index, message in enumerate(order.messages):
            if message.role not in ROLES:
                raise InvalidRequest(
                    f"messages[{index}].role must be one of {', '.join(ROLES)}", param=f"messages[{index}].role"
                )
        if order.continue_final_message and order.messages[-1].role != "assistant":
            raise InvalidRequest(
                "continue_final_message needs a last message of role assistant", param="continue_final_message"
            )
        self._template.check_arguments(order.template_kwargs)
        size = sum(len(text.encode()) for text in _all_texts(order))
        if size > self._max_bytes:
            raise InvalidRequest(
                f"messages hold {size} bytes of text, limit {self._max_bytes} (chat.max_prompt_bytes)", param="messages"
            )

    def _template_message(self, message: Message, marks: Marks) -> dict[str, Any]:
        """What the template sees: content always a text, fields without null, every text marked."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        # An assistant's own words may hold <think> or <tool_call>: templates look for them in the history they replay.
        finder = self._spellings.control if role == "assistant" else self._spellings.every
        seen: dict[str, Any] = {"role": role, "content": mark_text(message.content or "", finder, marks.cut)}
        for name, value in message.fields.items():
            if value is None or name in seen:
                continue
            own_words = isinstance(value, str) and name.startswith("reasoning")
            shown = with_parsed_arguments(value) if name == "tool_calls" else value
            marked = mark_value(shown, finder if own_words else self._spellings.every, marks.cut, name=name)
            seen[name] = with_printable_arguments(marked) if name == "tool_calls" else marked
        return seen

    def _spans(
        self, text: str, messages: list[dict[str, Any]], marks: Marks, printed: Callable[..., str]
    ) -> list[tuple[int, int, int]]:
        """Where contents lie, seen by printing them again with anchors in them."""
        contents = [message["content"].replace(marks.end, "") for message in messages]
        anchors = [anchor_position(content, self._spellings.every, marks.cut) for content in contents]
        anchored = printed([anchored_message(each, anchors[i], i, marks.anchor) for i, each in enumerate(messages)])
        return find_spans(text, anchored, messages, anchors, marks)


class Text(msgspec.Struct, frozen=True):
    """A rendered prompt with its marks, and where message contents lie in it: (message, start, end) in characters."""

    marked: str
    marks: Marks
    spans: tuple[tuple[int, int, int], ...]
    started_at: float
    ended_at: float


def _all_texts(order: Prepare) -> list[str]:
    found = [message.content or "" for message in order.messages]
    for message in order.messages:
        found += texts_in(message.fields)
    return [*found, *texts_in(order.template_kwargs), *texts_in(order.tools)]


def _cut_at_end(text: str, marks: Marks) -> str:
    end = text.rfind(marks.end)
    if end < 0:
        raise InvalidRequest(
            "this model's chat template does not print the last message as it is, so it can't be continued",
            param="continue_final_message",
        )
    return text[:end]
