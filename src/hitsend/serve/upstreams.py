"""Upstreams as the settings name them: engines, their terms, their prices.

Enters: `[[engines]]`. Leaves: engines to start, and what `app.py` puts among the stages. Always true: two engines never
share a name, nor two models; an upstream's key is read here from its variable or file, and goes into the engine and
nowhere else; the secret that salts are made of is this folder's own, and the same for all its processes. Next:
`children.py`.
"""

import contextlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError, ServeError
from hitsend.core.request import Request
from hitsend.core.vocabulary import Vocabulary
from hitsend.serve.chat.checkpoint import CheckpointFiles, can_count
from hitsend.serve.chat.handover import Counter, Handover, check, handed_over, refuse
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.chat.text import TextChild
from hitsend.serve.engine.models import NO_MODEL
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.openai_body import asked, template_arguments, told_tools
from hitsend.serve.engine.protocol import Engine
from hitsend.serve.engine.terms import Terms, addresses, kind_of
from hitsend.serve.usage.pricing import Price
from hitsend.settings import PriceSettings, Settings
from hitsend.settings_source import secret
from hitsend.settings_upstreams import UpstreamBase, VllmSettings, WorkersAISettings

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_THERE = re.compile(r"[A-Za-z0-9@][A-Za-z0-9@._:/+-]{0,255}")
_TAKEN = "embedded"
SALT_FILE = "upstreams.secret"
"""In the data folder."""


class Upstreams(msgspec.Struct, frozen=True):
    """`engines` and `texts` (which count for them) are to be started and stopped; the rest goes by models' names here.
    `names`: kind, and name there.
    """

    engines: tuple[OpenAIEngine, ...] = ()
    by_model: dict[str, Engine] = {}
    handovers: dict[str, Handover] = {}
    prices: tuple[PriceSettings, ...] = ()
    names: dict[str, tuple[str, str]] = {}
    embedders: dict[str, OpenAIEngine] = {}
    texts: tuple[TextChild, ...] = ()


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

    def vocabulary_of(self, model: str) -> Vocabulary | None:
        """What that model's ids say; None for one that runs elsewhere."""
        return None if model in self._handovers else self._of(model).vocabulary

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
        if terms is not None and isinstance(terms.counter, OwnCount):
            told = handed_over(request, terms, check(request, terms, set(asked(request))))
            return await terms.counter.prepared(told, wants_text=wants_text)
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
    names: dict[str, tuple[str, str]] = {}
    embedders: dict[str, OpenAIEngine] = {}
    texts: dict[tuple[str, bool], TextChild] = {}
    secret_salt = None
    for one in settings.engines:
        if not isinstance(one, UpstreamBase):
            continue
        _check(one, settings, {_TAKEN, *engines}, names)
        secret_salt = secret_salt or kept_secret(Path(settings.server.data_dir) / SALT_FILE)
        command = serve_command(one)
        if command and settings.server.workers > 1:
            raise ConfigError(f"engines[{one.name}].serve_model: not together with server.workers above 1")
        engine = OpenAIEngine(one, clock, key=key_of(one), salt=secret_salt, command=command, on_tokens=on_tokens)
        engines[one.name] = engine
        by_model |= dict.fromkeys(one.models, engine)
        counter = _counter(one, engine, settings, texts)
        handovers |= {model: _handover(one, engine, counter) for model in one.models}
        embedders |= dict.fromkeys(one.embedding_models, engine)
        for model, there in (*one.models.items(), *one.embedding_models.items()):
            names[model] = (kind_of(one), there)
            prices += _prices(one, model)
    return Upstreams(
        tuple(engines.values()), by_model, handovers, tuple(prices), names, embedders, tuple(texts.values())
    )


class OwnCount:
    """An upstream's prompts counted and shown here, by the tokenizer and template of the checkpoint that it serves."""

    def __init__(self, text: TextChild, terms: Terms) -> None:
        self._text = text
        self._terms = terms

    async def __call__(self, request: Request) -> int | None:
        """The prompt's tokens; None where they can't be told (the template refuses the messages, it took too long)."""
        try:
            if request.prompts:
                return sum([await self._of_prompt(prompt) for prompt in request.prompts])
            return (await self.prepared(request, only_counts=True)).num_tokens
        except ServeError:
            return None

    async def prepared(self, request: Request, *, wants_text: bool = False, only_counts: bool = False) -> Prompt:
        """The prompt as the upstream's template makes it. Raises as `TextChild.prepare`."""
        known = {*self._text.facts.template_variables, "enable_thinking"}
        arguments = template_arguments(request, self._terms)
        told = {name: value for name, value in arguments.items() if name in known}
        request = msgspec.structs.replace(request, template_kwargs=told)
        tools = None if self._terms.profile.prompts_as_here else told_tools(request, self._terms)
        return await self._text.prepare(request, wants_text=wants_text, tools=tools, only_counts=only_counts)

    async def _of_prompt(self, prompt: str | tuple[int, ...]) -> int:
        return len(await self._text.tokenize(prompt, add_special=True) if isinstance(prompt, str) else prompt)


def _counter(
    one: UpstreamBase, engine: OpenAIEngine, settings: Settings, texts: dict[tuple[str, bool], TextChild]
) -> Counter | None:
    """Who counts its prompts, if not the embedded model. `texts` gets what has to be started for it."""
    path = one.tokenizer or _served_folder(one)
    if path is None:
        counts = one.counts_prompts or ("upstream" if engine.terms.profile.count_path is not None else "bytes")
        return engine.count_prompt if counts == "upstream" else None
    files = CheckpointFiles(f"engines[{one.name}].tokenizer", path, engine.terms.profile.reads_specials)
    key = (files.path, files.reads_specials)
    if key not in texts:
        # chat.template is for the model that runs here
        chat = msgspec.structs.replace(settings.chat, template=None)
        texts[key] = TextChild(files.path, chat, checkpoint=files)
    return OwnCount(texts[key], engine.terms)


def _served_folder(one: UpstreamBase) -> str | None:
    """The checkpoint that a vLLM of our own serves, where prompts can be counted by it and nobody said otherwise."""
    if not isinstance(one, VllmSettings) or one.serve_model is None or one.counts_prompts is not None:
        return None
    # another tokenizer or template, or another way to read one
    is_told = any(word.startswith(("--tokenizer", "--chat-template", "--config")) for word in one.serve_arguments)
    folder = str(Path(one.serve_model).expanduser())
    return folder if not is_told and can_count(folder) else None


def _handover(one: UpstreamBase, engine: OpenAIEngine, counter: Counter | None) -> Handover:
    return Handover(
        engine=one.name,
        context=one.context,
        max_tokens=one.max_tokens,
        takes=engine.terms.takes,
        ignores=one.unsupported == "ignore",
        is_counted=one.counts_prompts == "embedded",
        counter=counter,
        neurons_limit_micro=engine.neurons_limit_micro,
        takes_prompts=engine.terms.profile.completions_path is not None,
        knows_developer=engine.terms.profile.knows_developer,
        takes_thoughts="reasoning_content" not in one.lacks,
    )


def check_plan(settings: Settings, engine: str, model: str, price: Price) -> None:
    """Raises ConfigError for a model that its engine's plan doesn't serve."""
    for one in settings.engines:
        if isinstance(one, WorkersAISettings) and one.name == engine and one.plan == "free" and price.is_paid_only:
            raise ConfigError(f"engines[{engine}].models: {model} needs Workers AI's paid plan, engines.plan is free")


def _check(one: UpstreamBase, settings: Settings, names: set[str], models: Collection[str]) -> None:
    where = f"engines[{one.name}]"
    if not _NAME.fullmatch(one.name) or one.name in names:
        raise ConfigError(f"engines.name: {one.name!r} is taken, or not 1 to 64 letters, digits, dots, _ and -")
    if not (one.models or one.embedding_models):
        raise ConfigError(f'{where}.models: expected at least one name = "name at the upstream"')
    for model, there in (*one.models.items(), *one.embedding_models.items()):
        if model in models or not model or (model in one.models and model in one.embedding_models):
            raise ConfigError(f"{where}.models: {model!r} is empty, or served by another engine too")
        if not _NAME_THERE.fullmatch(there):
            raise ConfigError(f"{where}.models: {there!r} is no name at an upstream")
    _check_count(one, where, has_model=settings.engine.model != NO_MODEL)
    urls = addresses(one)
    if not urls or len(set(urls)) != len(urls):
        also = ", or account_id" if isinstance(one, WorkersAISettings) else ""
        raise ConfigError(f"{where}.base_url: expected an address, or different ones in base_urls{also}")
    if one.base_url and one.base_urls:
        raise ConfigError(f"{where}.base_url: set beside base_urls, one of them is enough")
    if one.hedge_after_s and len(urls) < 2:
        raise ConfigError(f"{where}.hedge_after_s: needs several base_urls")
    if strays := set(one.draining) - set(urls):
        raise ConfigError(f"{where}.draining: {min(strays)} is none of its base_urls")


def _check_count(one: UpstreamBase, where: str, *, has_model: bool) -> None:
    if one.counts_prompts == "embedded" and not has_model:
        raise ConfigError(f"{where}.counts_prompts: embedded, but engine.model is none")
    if one.counts_prompts == "tokenizer" and one.tokenizer is None:
        raise ConfigError(f"{where}.counts_prompts: tokenizer, but no tokenizer is set beside it")
    if one.counts_prompts not in (None, "tokenizer") and one.tokenizer is not None:
        raise ConfigError(f"{where}.tokenizer: {one.tokenizer} isn't used with counts_prompts = {one.counts_prompts}")


def serve_command(one: UpstreamBase) -> tuple[str, ...]:
    """What starts its server here; empty where it is there already. Raises ConfigError."""
    if not isinstance(one, VllmSettings) or one.serve_model is None:
        return ()
    url = urlsplit(one.base_url)
    if one.base_urls or url.scheme != "http" or url.hostname not in ("127.0.0.1", "localhost") or not url.port:
        raise ConfigError(
            f"engines[{one.name}].serve_model: needs a base_url of this machine (http://127.0.0.1:PORT), no base_urls"
        )
    names = tuple(dict.fromkeys((*one.models.values(), *one.embedding_models.values())))
    address = ("--host", "127.0.0.1", "--port", str(url.port))
    told = ("--served-model-name", *names, "--enable-prompt-tokens-details")  # else nobody learns what was cached
    return (*one.serve_command, one.serve_model, *address, *told, *one.serve_arguments)


def key_of(one: UpstreamBase) -> str | None:
    """The upstream's credential. Raises ConfigError where it is named and not there."""
    if one.api_key_env is not None and one.api_key_file is not None:
        raise ConfigError(f"engines[{one.name}].api_key_file: set beside api_key_env, one of them is enough")
    if one.api_key_env is not None:
        return _usable(secret(one.api_key_env), f"engines[{one.name}].api_key_env: the environment", one.api_key_env)
    if one.api_key_file is None:
        return None
    try:
        text = Path(one.api_key_file).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    return _usable(text, f"engines[{one.name}].api_key_file: the disk", one.api_key_file)


def _usable(key: str | None, where: str, name: str) -> str:
    key = (key or "").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where} has no usable {name}")
    return key


def kept_secret(path: Path) -> bytes:
    """32 random bytes that stay the same; made when they aren't there, for this user only. Raises ConfigError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as fresh:  # mode 0600
            fresh.write(secrets.token_bytes(32))
            fresh.flush()
            with contextlib.suppress(FileExistsError):
                os.link(fresh.name, path)  # whole or not at all, also when several processes start at once
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.data_dir: {path.name} can't be kept there ({error.strerror})") from error


def _prices(one: UpstreamBase, model: str) -> list[PriceSettings]:
    if one.prices is None:
        return []
    found = one.prices
    own = f"engines.{one.name}"
    return [
        PriceSettings(model, found.input, found.output, found.cached_input, id=own, batch_discount=found.batch_discount)
    ]
