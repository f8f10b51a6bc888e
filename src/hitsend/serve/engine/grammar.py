"""llguidance behind the loop's `Matcher`: the only file that knows the library.

Two processes use it. The text child turns a `GrammarSource` into a grammar's text and compiles it once, under limits of
time and memory that the kernel keeps: a grammar that kills its compiler is refused there. The engine's child compiles
the text again, on a thread while the steps go on, and gives each sequence a copy.

Enters: a vocabulary, grammars as text. Leaves: matchers. Always true: compiled grammars are kept in a bounded cache by
their sha256; one that ran into a limit is forgotten, since copies share what they have learnt; the library never gets
to see a schema of the client's options for itself. Next: `worker.py`.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from hitsend.core.constraint import WHITESPACE, GrammarSource
from hitsend.serve.loop.grammar import GrammarFailed

LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""The library counts about 14 units of step fuel, or 20 items, per microsecond: a hostile step ends after some 10 ms.
States take 1 to 2 kB each, so one grammar can't hold more than 40 MB of them.
"""

MAX_CACHED = 32
"""Compiled grammars per process."""

MAX_CACHED_BYTES = 8 * 1024 * 1024
"""Their text, together."""

JSON_OPTIONS: Any = {
    "whitespace_pattern": WHITESPACE,
    "whitespace_flexible": True,
    "coerce_one_of": False,
    "lenient": False,
}

_OPEN_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\\Z")
_REGEX_MARKS = frozenset(r"\.+*?()|[]{}^$#&-~/")


def grammar_text(source: GrammarSource) -> str:
    """The grammar in the library's notation. It need not be a good one (see `Compiler.check`). Raises ValueError."""
    if source.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(source.value), overrides=JSON_OPTIONS)
    if source.kind == "regex":
        if _OPEN_ESCAPE.search(source.value):
            raise ValueError("the regex ends inside an escape")
        return LLMatcher.grammar_from_regex(source.value)
    if source.kind == "choice":
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, source.value)))
    return LLMatcher.grammar_from_lark(source.value)


class _Words(TokenizerWrapper):
    """What the library wants to know of a tokenizer."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        control_ids: Collection[int],
        end_id: int,
        encode: Callable[[bytes], list[int]],
    ) -> None:
        self.eos_token_id = end_id
        self.bos_token_id = None
        # A leading 0xff is the library's mark of a token that is never text.
        self.tokens = [b"\xff" + text if i in control_ids else text for i, text in enumerate(token_bytes)]
        self.special_token_ids = sorted(control_ids)
        self._gtokenizer = encode
        self._accepts_bytes = True
        self.is_tokenizer_wrapper = True


class Compiler:
    """Compiles grammars for one vocabulary; keeps the last ones. Making it takes 0.1 s for 50,000 tokens."""

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        control_ids: Collection[int],
        end_ids: Collection[int],
        encode: Callable[[bytes], list[int]],
    ) -> None:
        ends = sorted(end_ids)
        self._tokenizer: LLTokenizer | None = None
        if ends:
            words = _Words(token_bytes, control_ids, ends[0], encode)
            self._tokenizer = LLTokenizer(words, n_vocab=len(token_bytes), eos_token=ends)
        self._num_words = (len(token_bytes) + 31) // 32
        self._vocab_size = len(token_bytes)
        self._cache: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._cached_bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def check(self, grammar: str) -> str | None:
        """Compile it and take its first step; what is wrong with it, or None. Keeps nothing."""
        try:
            matcher = self._started(self._compile(grammar), lambda: None)
            allowed = np.flatnonzero(~matcher.forbidden())
            if not allowed.size:
                return "nothing can match it"
            # Where only one text is possible, and no end, the library finds out with the first token.
            matcher.accept(int(allowed[-1]))
        except GrammarFailed as failed:
            return str(failed)
        return None

    def matcher(self, grammar: str) -> "LlMatcher":
        """A fresh one at the grammar's beginning. Raises GrammarFailed."""
        key = _key(grammar)
        found = self._cache.get(key)
        if found is None:
            compiled = self._compile(grammar)
            self._keep(key, compiled, len(grammar))
        else:
            self._cache.move_to_end(key)
            compiled = found[0]
        return self._started(compiled.deep_copy(), lambda: self._forget(key))

    def is_ready(self, grammar: str) -> bool:
        """Whether `matcher` would not have to compile."""
        return _key(grammar) in self._cache

    def prepare(self, grammar: str) -> "Future[LLMatcher]":
        """Compile on a thread (the library lets go of the interpreter's lock); hand the result to `prepared`."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        return self._pool.submit(self._compile, grammar)

    def prepared(self, grammar: str, done: "Future[LLMatcher]") -> None:
        """Keep what `prepare` made. Where it failed, `matcher` will say why."""
        if done.exception() is None:
            self._keep(_key(grammar), done.result(), len(grammar))

    def _started(self, matcher: LLMatcher, on_failure: Callable[[], None]) -> "LlMatcher":
        return LlMatcher(matcher, self._num_words, self._vocab_size, on_failure)

    def _compile(self, grammar: str) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarFailed("this model has no end token, so an answer could not end where its grammar does")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarFailed(_first_line(matcher.get_error()), is_too_complex=True)
        return matcher

    def _keep(self, key: bytes, compiled: LLMatcher, size: int) -> None:
        self._forget(key)
        self._cache[key] = (compiled, size)
        self._cached_bytes += size
        while len(self._cache) > MAX_CACHED or (self._cached_bytes > MAX_CACHED_BYTES and len(self._cache) > 1):
            self._forget(next(iter(self._cache)))

    def _forget(self, key: bytes) -> None:
        found = self._cache.pop(key, None)
        if found is not None:
            self._cached_bytes -= found[1]


class LlMatcher:
    """See `loop/grammar.py`."""

    def __init__(self, matcher: LLMatcher, num_words: int, vocab_size: int, on_failure: Callable[[], None]) -> None:
        self._matcher = matcher
        self._words = np.zeros(num_words, np.uint32)
        self._vocab_size = vocab_size
        self._on_failure = on_failure

    def forbidden(self) -> NDArray[np.bool_]:
        """True for each token that may not come next. Raises GrammarFailed."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._check()
        inverted = np.invert(self._words).view(np.uint8)
        return np.unpackbits(inverted, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> None:
        """The token came. Raises GrammarFailed."""
        if not self._matcher.consume_token(token_id):
            self._check()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        """The library never raises by itself: a failed matcher stays failed and allows only the end."""
        if not self._matcher.is_error():
            return
        self._on_failure()
        message = self._matcher.get_error()
        is_too_complex = (
            self._matcher.stop_reason() in {"ParserTooComplex", "LexerTooComplex"} or "too " in message.lower()
        )
        raise GrammarFailed(_first_line(message), is_too_complex=is_too_complex)


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()


def _escaped(text: str) -> str:
    return "".join("\\" + char if char in _REGEX_MARKS else char for char in text)


def _first_line(message: str) -> str:
    return message.strip().replace("\n<non-verbose/>", "").split("\n   1 |")[0][:300]
