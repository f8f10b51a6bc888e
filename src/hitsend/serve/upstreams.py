"""Upstreams as the settings name them: engines, their terms, their prices.

Enters: `[[engines]]`. Leaves: engines to start, and what `app.py` puts among the stages. Always true: two engines never
share a name, nor two models; an upstream's key is read here from its variable, and goes into the engine and nowhere
else. Next: `children.py`.
"""

import re
from collections.abc import Callable

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.core.request import Request
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.handover import Handover, refuse
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.chat.text import TextChild
from hitsend.serve.engine.models import NO_MODEL
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.protocol import Engine
from hitsend.settings import PriceSettings, Settings, UpstreamSettings
from hitsend.settings_source import secret

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TAKEN = "embedded"


class Upstreams(msgspec.Struct, frozen=True):
    """`engines` are to be started and stopped; the rest goes by the models' names here."""

    engines: tuple[OpenAIEngine, ...] = ()
    by_model: dict[str, Engine] = {}
    handovers: dict[str, Handover] = {}
    prices: tuple[PriceSettings, ...] = ()


NO_UPSTREAMS = Upstreams()


class OwnText:
    """The text child for routes that only look: it answers for models that run here, and says who else would."""

    def __init__(
        self, text: TextChild, handovers: dict[str, Handover], texts: dict[str, TextChild] | None = None
    ) -> None:
        """`texts` go by served model; `text` is for everything else."""
        self._text = text
        self._handovers = handovers
        self._texts = texts or {}

    @property
    def vocabulary(self) -> Vocabulary:
        """As `TextChild.vocabulary`."""
        return self._text.vocabulary

    async def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = False, model: str | None = None
    ) -> tuple[int, ...]:
        """As `TextChild.tokenize`, for that model."""
        return await self._of(model).tokenize(text, add_special=add_special, parse_special=parse_special)

    async def detokenize(self, token_ids: tuple[int, ...], *, model: str | None = None) -> str:
        """As `TextChild.detokenize`, for that model."""
        return await self._of(model).detokenize(token_ids)

    async def tokenize_chat(self, request: Request) -> tuple[int, ...]:
        """As `TextChild.tokenize_chat`. Raises InvalidRequest for a model that is rendered elsewhere."""
        return (await self.prepare(request)).prompt_token_ids

    async def prepare(
        self, request: Request, *, wants_text: bool = False, max_prompt_tokens: int | None = None
    ) -> Prompt:
        """As `TextChild.prepare`. Raises InvalidRequest for a model that is rendered elsewhere."""
        terms = self._handovers.get(request.model)
        if terms is not None:
            refuse(request, terms)
        text = self._of(request.model)
        return await text.prepare(request, wants_text=wants_text, max_prompt_tokens=max_prompt_tokens)

    def _of(self, model: str | None) -> TextChild:
        return self._text if model is None else self._texts.get(model, self._text)


def build_upstreams(settings: Settings, clock: Clock, on_tokens: Callable[[str, int], None]) -> Upstreams:
    """Everything but the connections. Raises ConfigError."""
    if settings.engine.model == NO_MODEL and not settings.engines:
        raise ConfigError("engine.model is none, so at least one [[engines]] has to serve a model")
    engines: dict[str, OpenAIEngine] = {}
    by_model: dict[str, Engine] = {}
    handovers: dict[str, Handover] = {}
    prices: list[PriceSettings] = []
    for one in settings.engines:
        if not isinstance(one, UpstreamSettings):
            continue
        _check(one, settings, {_TAKEN, *engines}, by_model)
        engine = OpenAIEngine(one, clock, key=_key(one), on_tokens=on_tokens)
        engines[one.name] = engine
        for model in one.models:
            by_model[model] = engine
            handovers[model] = Handover(
                engine=one.name,
                context=one.context,
                max_tokens=one.max_tokens,
                passes=frozenset(one.passes),
                is_counted=one.counts_prompts == "embedded",
            )
            prices += _prices(one, model)
    return Upstreams(tuple(engines.values()), by_model, handovers, tuple(prices))


def _check(one: UpstreamSettings, settings: Settings, names: set[str], by_model: dict[str, Engine]) -> None:
    if not _NAME.fullmatch(one.name) or one.name in names:
        raise ConfigError(f"engines.name: {one.name!r} is taken, or not 1 to 64 letters, digits, dots, _ and -")
    if not one.models:
        raise ConfigError(f'engines[{one.name}].models: expected at least one name = "name at the upstream"')
    for model in one.models:
        if model in by_model or not model:
            raise ConfigError(f"engines[{one.name}].models: {model!r} is empty, or served by another engine too")
    if one.counts_prompts == "embedded" and settings.engine.model == NO_MODEL:
        raise ConfigError(f"engines[{one.name}].counts_prompts: embedded, but engine.model is none")


def _key(one: UpstreamSettings) -> str | None:
    if one.api_key_env is None:
        return None
    key = secret(one.api_key_env)
    if key is None or not key.isascii() or not key.isprintable():
        raise ConfigError(f"engines[{one.name}].api_key_env: the environment has no usable {one.api_key_env}")
    return key


def _prices(one: UpstreamSettings, model: str) -> list[PriceSettings]:
    if one.prices is None:
        return []
    found = one.prices
    own = f"engines.{one.name}"
    return [
        PriceSettings(model, found.input, found.output, found.cached_input, id=own, batch_discount=found.batch_discount)
    ]
