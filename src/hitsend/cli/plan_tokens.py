"""`hitsend plan tokens`: what texts become in a real tokenizer, by language and kind, and what that costs.

Enters: files, a model's GGUF or a tokenizer.json. Leaves: tokens per word, characters and bytes per token, USD. Always
true: a GGUF's tokenizer is the text child's, the one that serves; long files go in at line ends, piece by piece; a
tokenizer.json needs the package tokenizers, an extra. Next: `plan_data.py`.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import CallFailed, options
from hitsend.cli.plan_memory import FactsFile
from hitsend.core.errors import ConfigError, ServeError
from hitsend.plan.cost import MILLION, Rate
from hitsend.plan.facts import load_facts
from hitsend.plan.prices import find_rate, usd
from hitsend.plan.tokens import TextCount, add_up, count_text

PIECE_CHARACTERS = 200_000

Count = Callable[[list[str]], list[int]]


def tokens(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Texts in UTF-8.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="M", help="GGUF or name; default the settings'.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", metavar="FILE", help="A tokenizer.json.")] = None,
    price: Annotated[str | None, typer.Option("--price", metavar="P", help="What the tokens cost as input.")] = None,
    language: Annotated[str | None, typer.Option("--language", help="Of every file; default: guessed.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="prose, code … of every file; default: guessed.")] = None,
    config: options.Config = None,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> None:
    """Tokens per word by language and kind of text, with the tokenizer that will be billed."""
    texts = [_read(file) for file in files]
    rate = None if price is None else find_rate(price, load_facts(facts))
    counted = _from_json(tokenizer, texts) if tokenizer else asyncio.run(_from_model(model, config, texts))
    found = [
        count_text(text, number, language=language, kind=kind) for text, number in zip(texts, counted, strict=True)
    ]
    if as_json:
        rows = [{"file": str(file), **_row(one, rate)} for file, one in zip(files, found, strict=True)]
        print(msgspec.json.encode({"files": rows, "groups": [_row(one, rate) for one in add_up(found)]}).decode())
        return
    print("\n".join(tokens_text(found, rate)))


def tokens_text(found: list[TextCount], rate: Rate | None) -> list[str]:
    """One line for each language and kind."""
    groups = add_up(found)
    cheapest = min((one.fertility or 0 for one in groups if one.fertility), default=0.0)
    lines = []
    for one in groups:
        texts = f"{one.words:,} words and {one.characters:,} characters"
        line = (
            f"{one.language} {one.kind}: {one.tokens:,} tokens for {texts}: "
            f"{one.fertility or 0:.2f} tokens a word, {one.characters_per_token or 0:.2f} characters and "
            f"{one.bytes_per_token or 0:.2f} bytes a token"
        )
        if len(groups) > 1 and cheapest and one.fertility:
            line += f", {one.fertility / cheapest:.2f} x the least"
        if rate is not None:
            line += f"; {usd(one.tokens * rate.input_usd / MILLION)} USD as input, {usd(_per_million_words(one, rate))}"
            line += " USD a million words"
        lines.append(line)
    return lines


def _row(one: TextCount, rate: Rate | None) -> dict[str, Any]:
    row: dict[str, Any] = msgspec.to_builtins(one) | {
        "fertility": one.fertility,
        "characters_per_token": one.characters_per_token,
        "bytes_per_token": one.bytes_per_token,
    }
    if rate is not None:
        row["input_usd"] = float(one.tokens * rate.input_usd / MILLION)
        row["output_usd"] = float(one.tokens * rate.output_usd / MILLION)
        row["usd_per_million_words"] = float(_per_million_words(one, rate))
    return row


def _per_million_words(one: TextCount, rate: Rate) -> Any:
    return one.tokens * rate.input_usd / max(1, one.words)


def _read(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except OSError as failure:
        raise CallFailed(f"can't read {file}: {failure.strerror}") from None
    except UnicodeDecodeError as failure:
        raise CallFailed(f"can't read {file}: {failure}") from None
    if not text.strip():
        raise CallFailed(f"{file}: there is no text in it, needed is a word or more")
    return text


def pieces(text: str) -> list[str]:
    """The text in pieces of at most so many characters, cut behind line ends where there are any."""
    found = []
    while len(text) > PIECE_CHARACTERS:
        cut = text.rfind("\n", 0, PIECE_CHARACTERS) + 1 or PIECE_CHARACTERS
        found.append(text[:cut])
        text = text[cut:]
    return [*found, text] if text else found


def _from_json(path: Path, texts: list[str]) -> list[int]:
    # the planner's other commands start without the server's libraries
    from hitsend.serve.chat.checkpoint import load_tokenizer  # noqa: PLC0415

    try:
        loaded = load_tokenizer(path, "--tokenizer")
    except ConfigError as error:
        raise CallFailed(str(error)) from None
    return [sum(len(loaded.encode(piece, add_special_tokens=False).ids) for piece in pieces(text)) for text in texts]


async def _from_model(model: str | None, config: Path | None, texts: list[str]) -> list[int]:
    # the planner's other commands start without the server's libraries
    from hitsend.serve.chat.text import TextChild  # noqa: PLC0415
    from hitsend.serve.children import models_dir  # noqa: PLC0415
    from hitsend.serve.engine.models import resolve  # noqa: PLC0415

    settings = options.settings_from(config, None, engine__model=model).settings
    file = resolve(settings.engine.model, models_dir(settings))
    child = TextChild(file.path, settings.chat, libllama=settings.engine.libllama)
    try:
        await child.start()
        return [sum([len(await child.tokenize(piece)) for piece in pieces(text)]) for text in texts]
    except ServeError as error:
        raise CallFailed(error.message) from None
    finally:
        await child.stop()
