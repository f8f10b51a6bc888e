"""Reading numbers out of a model's config so that what is missing gets its name.

Enters: a decoded config.json. Leaves: numbers. Always true: a key that is needed and isn't there, or isn't a usable
number, is a ConfigError that names the key and the file; nothing gets a silent default. Next: `config.py`.
"""

from collections.abc import Mapping
from typing import Any

from hitsend.core.errors import ConfigError

MAX_NUMBER = 2**40


class Keys:
    """A config, its text part flattened over it: multimodal checkpoints keep the language model in `text_config`."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        thinker = config.get("thinker_config")
        if isinstance(thinker, Mapping):  # the part of an omni model that reads and writes text
            config = {**config, **thinker}
        names = ("text_config", "llm_config", "language_config")
        name = next((name for name in names if config.get(name)), names[0])
        inner = config.get(name) or {}
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{source}: {name} is {str(inner)[:40]}, needed is an object")
        self.values: dict[str, Any] = {**config, **inner}
        self.source = source
        outer_type = config.get("model_type")
        self.model_type = str(inner.get("model_type") or outer_type or "")
        self.outer_type = str(outer_type or self.model_type)

    def beneath(self, told: Mapping[str, Any]) -> "Keys":
        """The same with these values where nothing stands yet."""
        new = Keys({}, self.source)
        new.values = {**told, **{name: value for name, value in self.values.items() if value is not None}}
        new.model_type, new.outer_type = self.model_type, self.outer_type
        return new

    def find(self, *names: str) -> Any:
        """The first of these keys that is there and not null."""
        for name in names:
            value = self.values.get(name)
            if value is not None:
                return value
        return None

    def number(self, *names: str) -> int:
        """A positive whole number that must be there. Raises ConfigError."""
        value = self.find(*names)
        if value is None:
            raise ConfigError(f"{self.source}: the key {names[0]!r} is missing, and {self.model_type} needs it")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_NUMBER:
            raise ConfigError(f"{self.source}: {names[0]} is {value!r}, needed is a whole number above 0")
        return value

    def maybe(self, *names: str, default: int = 0) -> int:
        """The same where it may be missing or 0. Raises ConfigError for what is no number."""
        value = self.find(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
            raise ConfigError(f"{self.source}: {names[0]} is {value!r}, needed is a whole number")
        return value

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false. Raises ConfigError for anything else."""
        value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {names[0]} is {value!r}, needed is true or false")
        return value

    def whole_numbers(self, name: str) -> list[int]:
        """A list of whole numbers from 0, or an empty one. Raises ConfigError."""
        value = self.find(name)
        if value is None:
            return []
        is_list = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
        if not is_list or min(value, default=0) < 0:
            raise ConfigError(f"{self.source}: {name} is {str(value)[:40]}, needed is a list of whole numbers from 0")
        return list(value)

    def words(self, *names: str) -> list[str]:
        """A list of words, or an empty one. Raises ConfigError."""
        value = self.find(*names)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{self.source}: {names[0]} must be a list of words")
        return value

    def word(self, *names: str) -> str | None:
        """A word, or None where there is none. Raises ConfigError for anything else."""
        value = self.find(*names)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{self.source}: {names[0]} is {str(value)[:40]}, needed is a word")
        return value
