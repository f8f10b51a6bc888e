"""Grammars on their way to the text child and back, what the edge remembers of them, and what a child died of.

Enters: grammar sources and their texts. Leaves: texts. Always true: the cache is bounded in entries and characters; a
grammar that ended its compiler is the grammar's fault, unless somebody else killed the process. Next: `prompt.py`.
"""

import hashlib
import signal
from collections import OrderedDict

import msgspec

from hitsend.core.constraint import GrammarSource
from hitsend.core.errors import EngineFailed, InvalidRequest, ServeError
from hitsend.serve.child import ChildExit
from hitsend.settings import ChatSettings

GRAMMAR_TIMEOUT_S = 2.0
"""Processor seconds for checking and compiling one grammar."""

MAX_CACHED = 256
MAX_CACHED_CHARS = 16 * 1024 * 1024

_KILLED_BY_GRAMMAR = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP})


class CheckGrammar(msgspec.Struct, frozen=True, tag="check_grammar"):
    """Compile a grammar, to see whether it can be: it may well be the end of this process."""

    source: GrammarSource


class Grammar(msgspec.Struct, frozen=True, tag="grammar"):
    """The answer to CheckGrammar: the grammar's text, which the engine can compile."""

    text: str


def grammar_key(source: GrammarSource) -> bytes:
    """The same for the same grammar. Raises InvalidRequest for what can't be sent to a child."""
    try:
        return hashlib.sha256(msgspec.msgpack.encode(source)).digest()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{source.param}: text holds half a surrogate pair", param=source.param) from None
    except OverflowError:
        raise InvalidRequest(f"{source.param}: a number is beyond 64 bits", param=source.param) from None
    except RecursionError:
        raise InvalidRequest(f"{source.param}: nested too deep", param=source.param) from None


class GrammarCache:
    """The grammars last used."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: bytes) -> str | None:
        """The text, which counts as used now."""
        if key not in self._texts:
            return None
        self._texts.move_to_end(key)
        return self._texts[key]

    def put(self, key: bytes, text: str) -> None:
        """Keep it; the ones unused for longest go."""
        self._chars += len(text) - len(self._texts.pop(key, ""))
        self._texts[key] = text
        while len(self._texts) > MAX_CACHED or (self._chars > MAX_CACHED_CHARS and len(self._texts) > 1):
            _, gone = self._texts.popitem(last=False)
            self._chars -= len(gone)


def end_reason(end: ChildExit, settings: ChatSettings, grammar: GrammarSource | None) -> ServeError:
    """Why the order in hand failed, from how the child ended. `grammar`: the one that it was compiling."""
    if grammar is not None and end.signal == signal.SIGPROF:
        text = f"{grammar.param}: compiling it took longer than {GRAMMAR_TIMEOUT_S:g} s"
        return InvalidRequest(text, param=grammar.param)
    if grammar is not None and end.signal in _KILLED_BY_GRAMMAR:
        text = f"{grammar.param}: compiling it took more memory than there is for it"
        return InvalidRequest(text, param=grammar.param)
    if end.signal == signal.SIGPROF:
        limit_ms = settings.render_timeout_s * 1000
        return InvalidRequest(
            f"the chat template took longer than {limit_ms:g} ms on these messages (chat.render_timeout_s)",
            param="messages",
        )
    if end.signal == signal.SIGVTALRM:
        limit_s = settings.tokenize_timeout_s
        return InvalidRequest(f"tokenising took longer than {limit_s:g} s (chat.tokenize_timeout_s)", param="messages")
    return EngineFailed(f"the text process died while it worked on this request ({end.how})")
