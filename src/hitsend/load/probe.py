"""What a target is and understands, found out before anything is measured.

Enters: a target. Leaves: its model, context, dialect and vocabulary. Always true: a few requests at most, each bounded;
what couldn't be found is None or an estimate that says so; a target that refuses every form of the request is refused
with its own words. Next: `drive.py`.
"""

import asyncio
import contextlib
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.load.client import Client, Unreachable
from hitsend.load.lengths import dice
from hitsend.load.result import Facts
from hitsend.load.sample import Sample
from hitsend.load.target import Dialect
from hitsend.load.words import CANDIDATES, FEWEST, PROBES, WORDS, Vocabulary, calibrated
from hitsend.load.workload import Ask

DIALECTS = (
    Dialect(),
    Dialect(ignores_end=False),
    Dialect(limit="max_completion_tokens", ignores_end=False),
    Dialect(ignores_end=False, gives_usage=False),
)
"""Tried in this order; the first that isn't refused stands."""
REFUSED = ("http_400", "http_422")
MOST_MODELS = 1000
LANES = 4


async def first_model(client: Client) -> tuple[str, int | None]:
    """The model that `/v1/models` names first (or the one asked for), and its context. Raises ConfigError."""
    wanted, name = client.target.model, client.target.name
    try:
        status, document = await client.get(client.target.api("models"))
    except Unreachable as error:
        raise ConfigError(f"target {name}: no server at {client.target.url} ({error})") from error
    if status in (401, 403):
        raise ConfigError(f"target {name}: {status} from {client.target.url}: it wants a key (flag --key)")
    models = [one for one in _list(document) if isinstance(one, dict) and isinstance(one.get("id"), str)]
    if not wanted and not models:
        raise ConfigError(f"target {name}: /v1/models answered {status} without a model: name one with --model")
    if wanted and models and all(one["id"] != wanted for one in models):
        known = _plain(", ".join(str(one["id"])[:100] for one in models[:5]))
        raise ConfigError(f"flag --model={wanted}: target {name} has {known}")
    chosen = next((one for one in models if one["id"] == wanted or not wanted), {})
    return wanted or chosen["id"], _context(chosen)


def _list(document: Any) -> list[Any]:
    data = document.get("data") if isinstance(document, dict) else None
    return data[:MOST_MODELS] if isinstance(data, list) else []


def _context(model: dict[str, Any]) -> int | None:
    """vLLM and hitsend say `max_model_len`; llama-server `meta.n_ctx`, others `context_length`."""
    meta = model.get("meta") if isinstance(model.get("meta"), dict) else {}
    found = (model.get("max_model_len"), meta and meta.get("n_ctx"), model.get("context_length"))
    return next((value for value in found if isinstance(value, int) and value > 0), None)


async def probe(client: Client, context: int | None, seed: int) -> Facts:
    """The rest. Raises ConfigError where no form of a request is served."""
    has_system, first = await _dialect(client, seed)
    form = await _tokenize_form(client)
    exact = None
    try:
        exact = form and await _exact(client, form, first, has_system=has_system, seed=seed)
    except Unreachable:
        form = None  # one that stalls is none: it would be asked once a word, and after every level
    vocabulary = exact or await _estimate(client, first, has_system=has_system, seed=seed)
    if first.claimed_output is None:
        client.target = msgspec.structs.replace(
            client.target, dialect=msgspec.structs.replace(client.target.dialect, gives_usage=False)
        )
    return Facts(client.target.model, context, client.target.dialect, vocabulary, form, has_system)


async def _dialect(client: Client, seed: int) -> tuple[bool, Sample]:
    """Sets the client's dialect; whether system messages are taken; the first good answer."""
    last = None
    for has_system in (True, False) if client.target.endpoint == "chat" else (False,):
        for dialect in DIALECTS:
            client.target = msgspec.structs.replace(client.target, dialect=dialect)
            last = await _ask(client, PROBES[0], seed, has_system=has_system)
            if last.outcome == "ok":
                return has_system, last
            if last.error not in REFUSED:
                raise _refusal(client, last)
    assert last is not None
    raise _refusal(client, last)


def _refusal(client: Client, sample: Sample) -> ConfigError:
    said = _plain(sample.detail)
    return ConfigError(f"target {client.target.name}: a first small request failed: {sample.error}: {said}")


def _plain(text: str) -> str:
    """What a server said, as part of one line that can't drive a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)


def _texts(words: int, seed: int, *, has_system: bool) -> tuple[str, ...]:
    """A probe's system and user message (or its one text): so many words together."""
    text = " ".join(dice(seed, "probe", words).choices(WORDS, k=words))
    system, _, user = text.partition(" ")
    return (system, user) if has_system else (text,)


async def _ask(client: Client, words: int, seed: int, *, has_system: bool) -> Sample:
    """One request of so many words, for two tokens of answer."""
    texts = _texts(words, seed, has_system=has_system)
    if client.target.endpoint == "completions":
        return await client.send(Ask({"prompt": texts[0]}, None, 2), 0.0)
    roles = ("system", "user")[-len(texts) :]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    return await client.send(Ask({"messages": messages}, None, 2), 0.0)


async def count(client: Client, form: str, text: str) -> int | None:
    """Tokens of a text by the target's `/tokenize`, without any around it; None where it gives none. Raises
    Unreachable."""
    if form == "content":
        document: dict[str, Any] = {"content": text, "add_special": False}
    else:
        document = {"model": client.target.model, "prompt": text, "add_special_tokens": False}
    status, answer = await client.post(f"{client.target.root()}/tokenize", document)
    tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
    return len(tokens) if isinstance(tokens, list) else None


async def _tokenize_form(client: Client) -> str | None:
    with contextlib.suppress(Unreachable):
        for form in ("content", "prompt"):
            if await count(client, form, WORDS[0]):
                return form
    return None


async def _exact(client: Client, form: str, first: Sample, *, has_system: bool, seed: int) -> Vocabulary | None:
    """By its tokenizer, where that agrees with its usage. Raises Unreachable."""
    small = first.claimed_input
    openings, words = await _single(client, form)
    if small is None or min(len(openings), len(words)) < FEWEST:
        return None
    counts = [await count(client, form, text) for text in _texts(PROBES[0], seed, has_system=has_system)]
    own = sum(number or 0 for number in counts)
    return Vocabulary(words, openings, 1.0, small - own, is_exact=True) if all(counts) and own <= small else None


async def _estimate(client: Client, first: Sample, *, has_system: bool, seed: int) -> Vocabulary:
    """By the usage of two probes."""
    small = first.claimed_input
    large = (await _ask(client, PROBES[1], seed, has_system=has_system)).claimed_input
    if small is None or large is None:
        return Vocabulary()
    return Vocabulary(WORDS, WORDS, *calibrated(small, large))


async def _single(client: Client, form: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that are one token: at the start of a text, and behind a space. All at once, if that shows them.
    Raises Unreachable."""
    lane = asyncio.Semaphore(LANES)

    async def tokens(text: str) -> int | None:
        async with lane:
            return await count(client, form, text)

    async def single(words: tuple[str, ...]) -> tuple[str, ...]:
        tasks = [asyncio.ensure_future(tokens(f"{word} {word}")) for word in words]
        try:
            counts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one of them failed: the others needn't try
                task.cancel()
        return tuple(word for word, number in zip(words, counts, strict=True) if number == 2)

    openings = await single(CANDIDATES)
    together = " ".join([*openings[:1], *WORDS])
    if openings and await tokens(together) == len(WORDS) + 1:
        return openings, WORDS
    return openings, await single(WORDS)
