"""The text child: a process of its own in which templates run and text becomes tokens, and which may be killed.

Enters: `Open`, then orders (`Prepare`, `TokenizeText`, `CheckGrammar`) on the inherited socket. Leaves: one answer to
each, in order. Always true: it loads no weights; once it is open it can't open a file, a socket or a process any more
(an audit hook refuses, whatever the template found); rendering, tokenising and compiling grammars have a time limit in
processor seconds that the kernel enforces, even inside C code, and memory has a limit too; a dead text child costs the
one request that killed it. Next: `chat/text.py`, which starts it.

    SIGPROF ends a rendering or a grammar that takes too long, SIGVTALRM a tokenisation: the edge knows its order, and
    reads which it was from the signal.
"""

import argparse
import gc
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.clock import SystemClock
from hitsend.core.constraint import GrammarSource
from hitsend.core.errors import ConfigError, EngineFailed, InvalidRequest, ServeError
from hitsend.core.vocabulary import Vocabulary
from hitsend.gguf import read_header
from hitsend.serve.chat.checkpoint import open_checkpoint
from hitsend.serve.chat.enforceable import enforceable
from hitsend.serve.chat.formats import recognised_reasoning_format, recognised_tool_format
from hitsend.serve.chat.grammars import GRAMMAR_TIMEOUT_S, CheckGrammar, Grammar
from hitsend.serve.chat.prompt import (
    Answer,
    Composer,
    NotOpened,
    Open,
    Opened,
    Order,
    Prepare,
    Refused,
    TextFacts,
    TokenIds,
    TokenizeText,
)
from hitsend.serve.chat.schema_check import check_schema
from hitsend.serve.chat.template import ChatTemplate, thinking_default
from hitsend.serve.chat.tokenizer import VocabularyTokenizer
from hitsend.serve.engine.grammar import Compiler, grammar_text
from hitsend.serve.engine.libllama import STRIPS_LEFT, STRIPS_RIGHT, UNKNOWN, die_with_parent, open_library
from hitsend.serve.engine.vocabulary import SPACE_PREFIX_KEY, LoadedModel
from hitsend.serve.parent import ParentLine

MEMORY_BYTES = 1024 * 1024 * 1024
"""Address space beyond what the open child uses."""

_SENTENCE_PIECE = frozenset({"llama", "t5"})
_SPECIAL_VARIABLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_FORBIDDEN = ("open", "socket.", "subprocess.", "os.", "shutil.", "ctypes.dlopen", "import", "exec", "compile", "pty.")


def read_vocabulary(model: LoadedModel) -> Vocabulary:
    """The loaded model's table. A model opened here never puts blanks in front itself: the table says whether to."""
    words, metadata = model.vocabulary, model.metadata
    return Vocabulary(
        token_bytes=words.token_bytes(),
        control_ids=words.control | words.with_attribute(UNKNOWN),
        user_defined_ids=words.user_defined,
        end_ids=words.eog,
        bos_id=words.bos,
        eos_id=words.eos,
        adds_bos=words.add_bos,
        adds_space_prefix=metadata.get("tokenizer.ggml.model") in _SENTENCE_PIECE
        and metadata.get(SPACE_PREFIX_KEY, "true") == "true",
        strips_left_ids=words.with_attribute(STRIPS_LEFT),
        strips_right_ids=words.with_attribute(STRIPS_RIGHT),
    )


def special_variables(metadata: Mapping[str, str], vocabulary: Vocabulary) -> dict[str, str]:
    """The variables bos_token, eos_token… as this checkpoint spells them; those it lacks are left undefined."""
    found = {name: int(metadata[key]) for name, key in _SPECIAL_VARIABLES.items() if metadata.get(key, "").isdecimal()}
    return {name: vocabulary.spelling(token) for name, token in found.items() if token < vocabulary.size}


class TextWorker:
    """Everything that the open child holds. Raises ConfigError for a file that can't be used."""

    def __init__(self, order: Open) -> None:
        self._order = order
        self._compiler: Compiler | None = None
        self.metadata: dict[str, str] = {}
        self._words = ""
        self._tokenizer: VocabularyTokenizer
        if order.checkpoint is None:
            source = tool_source = self._open_model(order)
            special = special_variables(self.metadata, self._tokenizer.vocabulary)
        else:
            found = open_checkpoint(order.checkpoint)
            source, tool_source, special = found.template, found.tool_template, found.special_tokens
            self._tokenizer = found.tokenizer
        self.vocabulary = self._tokenizer.vocabulary
        # marks lengthen a text at most twofold; the exact check is made without them
        most = 2 * order.max_prompt_bytes
        self.template = ChatTemplate(source, special_tokens=special, max_chars=most)
        self._composer = self._composer_of(self.template)
        self._tool_composer = None
        if tool_source != source:
            self._tool_composer = self._composer_of(ChatTemplate(tool_source, special_tokens=special, max_chars=most))

    def _open_model(self, order: Open) -> str:
        """A GGUF's words and grammars. Returns the template."""
        read_header(order.model_path)
        model = LoadedModel(open_library(order.libllama), order.model_path, vocab_only=True, adds_space_prefix=False)
        table = read_vocabulary(model)
        self.metadata, self._words = model.metadata, model.words_id(table.token_bytes)
        words = model.vocabulary
        self._tokenizer = VocabularyTokenizer(table, lambda text: words.tokenize(text.encode()))
        source = order.template if order.template is not None else model.chat_template
        if source is None:
            raise ConfigError(
                f"engine.model: {order.model_path} has no chat template; set chat.template to a Jinja file"
            )
        self._compiler = Compiler(table.token_bytes, table.control_ids, table.end_ids, words.tokenize)
        # What it imports at its first use can't be imported once the process is sealed.
        self._compiler.check(grammar_text(GrammarSource("json_schema", {"type": "object"})))
        return source

    def _composer_of(self, template: ChatTemplate) -> Composer:
        files = self._order.checkpoint
        as_is = files is not None and files.reads_specials
        return Composer(template, self._tokenizer, SystemClock(), self._order.max_prompt_bytes, as_is=as_is)

    def opened(self) -> Opened:
        """The answer to Open."""
        facts = TextFacts(
            metadata=self.metadata,
            template_sha256=self.template.sha256,
            template_variables=tuple(sorted(self.template.variables)),
            thinking_default=thinking_default(self.template),
            tool_format=recognised_tool_format(self.template.source, self.metadata.get("general.name", "")),
            reasoning_format=recognised_reasoning_format(self.template.source, self._tokenizer.spellings.ids),
            uses_tools=self.template.uses_tools,
            words=self._words,
        )
        is_table_wanted = self._order.wants_table and self._order.checkpoint is None
        return Opened(facts, self.vocabulary if is_table_wanted else None)

    def answer(self, order: Prepare | TokenizeText | CheckGrammar) -> Answer:
        """Do one order. ServeErrors become the answer."""
        try:
            if isinstance(order, CheckGrammar):
                return self._check_grammar(order.source)
            return self._prepare(order) if isinstance(order, Prepare) else self._tokenize(order)
        except ServeError as error:
            return Refused(error.code, error.message, error.param)
        except MemoryError:
            failure = EngineFailed("the text process ran out of memory on this request")
            return Refused(failure.code, failure.message)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            # others have work here: what nobody thought of ends this request, not the process
            failure = EngineFailed(f"the text process failed on this request ({type(error).__name__})")
            return Refused(failure.code, failure.message)

    def _prepare(self, order: Prepare) -> Answer:
        composer = self._tool_composer if self._tool_composer is not None and order.tools else self._composer
        with _TimeLimit(signal.ITIMER_PROF, self._order.render_timeout_s):
            text = composer.render(order)
        with _TimeLimit(signal.ITIMER_VIRTUAL, self._order.tokenize_timeout_s):
            return composer.tokenize(text, order)

    def _tokenize(self, order: TokenizeText) -> Answer:
        with _TimeLimit(signal.ITIMER_VIRTUAL, self._order.tokenize_timeout_s):
            ids = self._tokenizer.encode_text(
                order.text, add_special=order.add_special, parse_special=order.parse_special
            )
        return TokenIds(tuple(ids))

    def _check_grammar(self, source: GrammarSource) -> Answer:
        assert self._compiler is not None, "grammars are for models that run here"
        with _TimeLimit(signal.ITIMER_PROF, GRAMMAR_TIMEOUT_S):
            if source.kind == "json_schema":
                check_schema(source.value, source.param)
                source = msgspec.structs.replace(source, value=enforceable(source.value))
            for param, schema in source.schemas:
                check_schema(schema, param)
            try:
                text = grammar_text(source)
            except ValueError as error:
                raise InvalidRequest(f"{source.param}: {error}", param=source.param) from None
            wrong = self._compiler.check(text)
        if wrong is not None:
            raise InvalidRequest(f"{source.param}: {_in_our_words(wrong)}", param=source.param)
        return Grammar(text)


def _in_our_words(wrong: str) -> str:
    """The library names an option that no client can set."""
    if wrong.startswith("oneOf"):
        return "oneOf: its schemas have to exclude each other by type or by a property's const; otherwise use anyOf"
    return wrong


class _TimeLimit:
    """The process is ended by the timer's signal when the body takes longer. No handler: C code is interrupted too."""

    def __init__(self, timer: int, seconds: float) -> None:
        self._timer = timer
        self._seconds = seconds

    def __enter__(self) -> None:
        signal.setitimer(self._timer, self._seconds)

    def __exit__(self, *_exception: object) -> None:
        signal.setitimer(self._timer, 0.0)


def limit_memory(extra_bytes: int) -> None:
    """Let the address space grow by so much and no more; beyond it, allocations fail."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def seal() -> Callable[[str, tuple[Any, ...]], None]:
    """From now on every attempt to open, import, connect or start something fails in this process. Returns the hook."""

    def refuse(event: str, _arguments: tuple[Any, ...]) -> None:
        if event.startswith(_FORBIDDEN):
            raise PermissionError(f"the text process may not use {event}")

    sys.addaudithook(refuse)
    return refuse


def serve(line: ParentLine) -> int:
    """Answer orders until the edge is gone. Returns the exit status."""
    decoder = msgspec.msgpack.Decoder(Order)
    worker: TextWorker | None = None
    while not line.is_closed:
        for body in line.receive(timeout_s=60.0):
            order = decoder.decode(body)
            if isinstance(order, Open):
                try:
                    worker = TextWorker(order)
                except ConfigError as error:
                    line.send(msgspec.msgpack.encode(NotOpened(str(error))))
                    line.drain(5.0)
                    return 3
                line.send(msgspec.msgpack.encode(worker.opened()))
                # The vocabulary never changes: frozen, it costs later collections nothing.
                gc.collect()
                gc.freeze()
                limit_memory(MEMORY_BYTES)
                seal()
            elif worker is not None:
                line.send(msgspec.msgpack.encode(worker.answer(order)))
    return 0


def main() -> int:
    """Entry point: `python -m hitsend.serve.text_worker --fd N`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    die_with_parent()
    return serve(ParentLine(parser.parse_args().fd))


if __name__ == "__main__":
    raise SystemExit(main())
