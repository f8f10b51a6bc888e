"""A model file opened for its words only: tokens to bytes, text to tokens, the template and the metadata.

Enters: a checked GGUF path and a `Library`. Leaves: a `LoadedModel` (used by the text child, which loads no weights,
and by the decoder, which does) and its `Vocabulary`. Always true: nothing of the vocabulary changes after loading.
Not true, so `chat/tokenizer.py` checks it: that plain text never becomes a control token (SentencePiece merges can
spell one). Next: `llama_decoder.py`.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.libllama import CONTROL, USER_DEFINED, Library, address_of, override_bool

SPACE_PREFIX_KEY = "tokenizer.ggml.add_space_prefix"

_PIECE_BYTES = 4096
_READ = 0
"""How a file is loaded: not mapped. The library asks for that where nothing is allocated."""


class Vocabulary:
    """Tokens of a loaded model. `bos` and `eos` are None where the model has none."""

    def __init__(self, library: Library, model: int) -> None:
        self._library = library
        self._handle: int = library.llama_model_get_vocab(model)
        self.num_tokens: int = library.llama_vocab_n_tokens(self._handle)
        bos, eos = library.llama_vocab_bos(self._handle), library.llama_vocab_eos(self._handle)
        self.bos: int | None = bos if bos >= 0 else None
        self.eos: int | None = eos if eos >= 0 else None
        self.add_bos: bool = library.llama_vocab_get_add_bos(self._handle)
        attribute = library.llama_vocab_get_attr
        self._attributes = [attribute(self._handle, i) for i in range(self.num_tokens)]
        self.control: frozenset[int] = self.with_attribute(CONTROL)
        self.user_defined: frozenset[int] = self.with_attribute(USER_DEFINED)
        is_eog = library.llama_vocab_is_eog
        self.eog: frozenset[int] = frozenset(i for i in range(self.num_tokens) if is_eog(self._handle, i))

    def with_attribute(self, bit: int) -> frozenset[int]:
        """The tokens that have this attribute (`libllama.CONTROL` and so on)."""
        return frozenset(i for i, bits in enumerate(self._attributes) if bits & bit)

    def tokenize(self, text: bytes, *, parse_special: bool = False, add_special: bool = False) -> list[int]:
        """Text as ids. `add_special` puts BOS in front where the model wants it; `parse_special` reads control tokens.

        User-defined tokens are found in text either way: that is how the library treats them.
        """
        room = len(text) + 8
        ids = np.empty(room, np.int32)
        count: int = self._library.llama_tokenize(
            self._handle, text, len(text), ids.ctypes.data, room, add_special, parse_special
        )
        if count < 0:
            ids = np.empty(-count, np.int32)
            count = self._library.llama_tokenize(
                self._handle, text, len(text), ids.ctypes.data, len(ids), add_special, parse_special
            )
        if count < 0:
            raise ValueError(f"the tokenizer failed on {len(text)} bytes")
        return [int(i) for i in ids[:count].tolist()]

    def token_bytes(self) -> tuple[bytes, ...]:
        """What each id stands for, control tokens spelled out. Takes about a microsecond an id: ask once."""
        return self._pieces(range(self.num_tokens), _PIECE_BYTES)

    def _pieces(self, tokens: Iterable[int], room: int) -> tuple[bytes, ...]:
        # the function and the address are looked up once: that alone is most of what an id costs
        piece, buffer = self._library.llama_token_to_piece, np.empty(room, np.uint8)
        view, address, found = buffer.data, buffer.ctypes.data, []
        for token in tokens:
            length: int = piece(self._handle, token, address, room, 0, True)
            found.append(bytes(view[:length]) if length >= 0 else self._pieces((token,), -length)[0])
        return tuple(found)


class LoadedModel:
    """A model in memory; `vocab_only` leaves the weights on disk. Close it after every context that uses it.

    `adds_space_prefix` False keeps SentencePiece vocabularies from putting a blank in front of every text.
    `is_rehearsal`: weights and all that is made of the model are planned, not allocated, and nothing can be computed.
    `loads_head`: its MTP head, too.
    """

    def __init__(
        self,
        library: Library,
        path: str,
        *,
        vocab_only: bool = False,
        adds_space_prefix: bool = True,
        is_rehearsal: bool = False,
        loads_head: bool = False,
    ) -> None:
        self.library = library
        params = library.default_model_params()
        params.vocab_only, params.load_mtp = vocab_only, loads_head
        if is_rehearsal:
            params.no_alloc, params.load_mode = True, _READ
        overrides = override_bool(SPACE_PREFIX_KEY, value=False)
        if not adds_space_prefix:
            params.kv_overrides = address_of(overrides)
        library.take_lines()
        self.handle: int = library.llama_model_load_from_file(path.encode(), params) or 0
        if not self.handle:
            raise ConfigError(f"engine.model: libllama can't load {path}: {library.take_lines() or 'no reason given'}")
        self.vocabulary = Vocabulary(library, self.handle)
        self.metadata: dict[str, str] = self._metadata()

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's own Jinja template."""
        template: bytes | None = self.library.llama_model_chat_template(self.handle, None)
        return template.decode("utf-8", "replace") if template else None

    def words_id(self, token_bytes: Sequence[bytes]) -> str:
        """The same for files whose ids mean the same and whose prompts look the same: processes that load one file at
        different times see by it whether it was another one. `token_bytes` are the vocabulary's."""
        words, digest = self.vocabulary, hashlib.blake2b(digest_size=16)
        kinds = [sorted(kind) for kind in (words.control, words.user_defined, words.eog)]
        for part in (repr((words.bos, words.eos, words.add_bos, kinds)), self.chat_template or ""):
            digest.update(part.encode() + b"\0")
        for token in token_bytes:
            digest.update(len(token).to_bytes(4) + token)
        return digest.hexdigest()

    @property
    def is_recurrent(self) -> bool:
        """Whether some or all of its layers keep one state per sequence instead of one per token."""
        library = self.library
        return bool(library.llama_model_is_hybrid(self.handle) or library.llama_model_is_recurrent(self.handle))

    def close(self) -> None:
        """Free it. Safe to call twice."""
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = 0

    def _metadata(self) -> dict[str, str]:
        """Every GGUF key that isn't an array, with its value as text."""
        library, found = self.library, {}
        for i in range(library.llama_model_meta_count(self.handle)):
            key = self._text(library.llama_model_meta_key_by_index, i)
            found[key] = self._text(library.llama_model_meta_val_str_by_index, i)
        return found

    def _text(self, function: Callable[..., int], index: int) -> str:
        buffer = np.zeros(1024, np.uint8)
        length = function(self.handle, index, buffer.ctypes.data, len(buffer))
        if length >= len(buffer):
            buffer = np.zeros(length + 1, np.uint8)
            length = function(self.handle, index, buffer.ctypes.data, len(buffer))
        return buffer[: max(length, 0)].tobytes().decode("utf-8", "replace")
