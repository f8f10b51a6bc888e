"""A checkpoint's own tokenizer.json and chat template, for prompts that are counted here and computed elsewhere.

Enters: a path, and whether the server that computes reads special spellings in what people type. Leaves: a
`Checkpoint`, ready for a `Composer`. Always true: files are read once, bounded, before the text child is sealed;
nothing cuts or pads what is counted; every error names the setting and the file; the package tokenizers is used nowhere
else in the server, and needed only where somebody sets such a path. Next: `../text_worker.py`.
"""

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.marks import Marks
from hitsend.serve.chat.tokenizer import Encode, Encoded, Piece, VocabularyTokenizer

MAX_FILE_BYTES = 256 * 1024 * 1024
"""Of one file; the largest tokenizer.json in use have some 30 MB."""

_SPECIAL_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class CheckpointFiles(msgspec.Struct, frozen=True):
    """Where it is: a tokenizer.json, or the folder with it. `setting` is named in errors.

    `reads_specials`: the server renders messages as they come, and reads special spellings wherever they stand.
    """

    setting: str
    path: str
    reads_specials: bool


class Checkpoint(msgspec.Struct, frozen=True):
    """What was found. `tool_template`: used in place of `template` where tools are offered; mostly the same."""

    tokenizer: VocabularyTokenizer
    template: str
    tool_template: str
    special_tokens: dict[str, str]


class WholeTokenizer(VocabularyTokenizer):
    """As servers do that don't tell apart who wrote a special spelling: the text in one piece, specials and all."""

    def __init__(self, loaded: Any) -> None:
        """`loaded`: a tokenizers.Tokenizer."""
        nothing = Vocabulary((b"",) * _num_ids(loaded))
        super().__init__(nothing, lambda text: loaded.encode(text, add_special_tokens=False).ids)
        self._loaded = loaded

    def encode_prompt(self, text: str, marks: Marks) -> Encoded:
        """A rendered prompt; its control tokens aren't told apart."""
        ids = self._encode(marks.drop(text))
        return Encoded(tuple(ids), 0, (Piece(0, len(text), 0, len(ids)),))

    def encode_text(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """A prompt without messages, with what this checkpoint puts around texts."""
        del parse_special  # it always does
        return list(self._loaded.encode(text, add_special_tokens=add_special).ids)


def open_checkpoint(files: CheckpointFiles) -> Checkpoint:
    """Read it. Raises ConfigError."""
    path = Path(files.path)
    file = path / "tokenizer.json" if path.is_dir() else path
    loaded = load_tokenizer(file, files.setting)
    config = _document(file.parent / "tokenizer_config.json", files.setting)
    templates = _templates(file.parent, config, files.setting)
    template = templates.get("default") or next(iter(templates.values()))
    special = _document(file.parent / "special_tokens_map.json", files.setting) | config
    return Checkpoint(
        tokenizer=WholeTokenizer(loaded) if files.reads_specials else _apart(loaded, config),
        template=template,
        tool_template=templates.get("tool_use") or template,
        special_tokens={name: text for name in _SPECIAL_VARIABLES if (text := _spelling(special.get(name)))},
    )


def can_count(folder: str) -> bool:
    """Whether a folder has all that it takes, and the package is there."""
    path = Path(folder)
    if not (path / "tokenizer.json").is_file() or importlib.util.find_spec("tokenizers") is None:
        return False
    try:
        return bool(_templates(path, _document(path / "tokenizer_config.json", ""), ""))
    except ConfigError:
        return False


def load_tokenizer(file: Path, setting: str) -> Any:
    """A tokenizers.Tokenizer that neither cuts nor pads. Raises ConfigError naming the setting and the file."""
    text = _read(file, setting)
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError(f"{setting}: needs the package tokenizers: pip install 'hitsend[tokenizers]'") from None
    try:
        loaded = library.Tokenizer.from_str(text)
    # its Rust side raises plain Exception
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"{setting}: {file} is no tokenizer.json: {str(error)[:200]}") from None
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _apart(loaded: Any, config: Mapping[str, Any]) -> VocabularyTokenizer:
    """As hitsend's own: special tokens only where the template wrote them. The table spells none but these."""
    added: dict[int, Any] = loaded.get_added_tokens_decoder()
    spellings = [b""] * _num_ids(loaded)
    for token, one in added.items():
        spellings[token] = one.content.encode()
    encode, adds_space = _encoder(loaded, added)
    bos = loaded.token_to_id(_spelling(config.get("bos_token")))
    vocabulary = Vocabulary(
        token_bytes=tuple(spellings),
        control_ids=frozenset(token for token, one in added.items() if one.special),
        user_defined_ids=frozenset(token for token, one in added.items() if not one.special),
        bos_id=bos,
        adds_bos=bos is not None and config.get("add_bos_token") is True,
        adds_space_prefix=adds_space,
        strips_left_ids=frozenset(token for token, one in added.items() if one.lstrip),
        strips_right_ids=frozenset(token for token, one in added.items() if one.rstrip),
    )
    return VocabularyTokenizer(vocabulary, encode)


def _num_ids(loaded: Any) -> int:
    """With holes between them."""
    return 1 + max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)


def _encoder(loaded: Any, added: Mapping[int, Any]) -> tuple[Encode, bool]:
    """Plain text to ids as it stands behind a special token, and whether a blank is put in front of a whole text."""

    def alone(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    def behind(text: str) -> list[int]:
        ids = alone(front + text)
        return ids[1:] if ids[:1] == first else alone(text)

    plain = (one.content for one in added.values() if one.special and not (one.lstrip or one.rstrip or one.single_word))
    front = next(plain, "")
    first = alone(front)
    if len(first) != 1 or behind("a") == alone("a"):
        return alone, False
    return behind, True


def _templates(folder: Path, config: Mapping[str, Any], setting: str) -> dict[str, str]:
    """By name. A file of its own goes before what the configuration has, as transformers reads them."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {"default": _read(file, setting)}
    found = config.get("chat_template")
    if isinstance(found, str) and found:
        return {"default": found}
    if isinstance(found, list):
        pairs = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        if named := {name: text for name, text in pairs.items() if isinstance(name, str) and isinstance(text, str)}:
            return named
    raise ConfigError(
        f"{setting}: {folder} has no chat template: no chat_template.jinja, no chat_template in tokenizer_config.json"
    )


def _document(file: Path, setting: str) -> dict[str, Any]:
    """An object; an empty one where there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(_read(file, setting))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}: {file} is no JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{setting}: {file} is no JSON object")
    return found


def _read(file: Path, setting: str) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigError(f"{setting}: {file} has {size} bytes, limit {MAX_FILE_BYTES}")
        return file.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"{setting}: can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{setting}: {file} isn't UTF-8") from None


def _spelling(value: Any) -> str:
    """A special token as configurations write it: a text, or an object with one."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""
