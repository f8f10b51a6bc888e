"""Which checkpoint somebody means: a known name, a config.json, a folder of safetensors, or a GGUF file.

Enters: what was typed. Leaves: a `Checkpoint`. Always true: what is there as a file goes before a name; a name is
matched without its owner, without endings that don't change a shape (Instruct, FP8 …) and without the marks between its
parts, and what an ending says about the weights is kept; a fine-tune whose name ends in a known model's has its shapes,
and the plan says so; a name that nobody knows is refused with the nearest ones. Next: `formats.py`.
"""

import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.plan.checkpoint import Checkpoint
from hitsend.plan.config import checkpoint_of
from hitsend.plan.facts import Facts, KnownModel
from hitsend.plan.families import IN_KNOWN_TERMS, UNKNOWN
from hitsend.plan.formats import gguf_type
from hitsend.plan.weights import gguf_checkpoint, read_json, safetensors_checkpoint

_ENDINGS = {
    "fp8": "fp8",
    "dynamic": "fp8-dynamic",
    **dict.fromkeys(("w8a8", "int8", "8bit"), "int8"),
    **dict.fromkeys(("awq", "gptq", "int4", "4bit", "w4a16", "autoround", "g128"), "int4"),
    **dict.fromkeys(("nvfp4", "fp4"), "nvfp4"),
    "mxfp4": "mxfp4",
    **dict.fromkeys(("bf16", "fp16", "f16"), "bf16"),
    **dict.fromkeys(
        (
            *("instruct", "chat", "it", "base", "hf", "block", "quantized", "gguf", "text", "thinking", "preview"),
            *(
                "reasoning",
                "bnb",
                "qat",
                "mlx",
                "pt",
                "abliterated",
                "online",
                "marlin",
                "sym",
                "w8a16",
                "1m",
                "ct",
                "dwq",
            ),
            *("0528", "0324", "0905", "exp", "v1", "latest", "unsloth"),
        )
    ),
}
"""Endings of names that leave every shape as it is, and the weights they mean."""


_RELEASED = re.compile(r"2[3-9](0[1-9]|1[0-2])")
"""Year and month, as Mistral and Qwen number theirs."""
_GGUF_ENDING = re.compile(r"ud|i1|i?q\d\w*|[kx]|[sml]|x{1,2}[sl]|nl|[01]")
_GGUF_TYPE = re.compile(r"(?:^|-)(i?q\d(?:-(?:[k01sml]|x{1,2}[sl]|nl))*)(?:-gguf)?$")


UNPUBLISHED = {
    "deepseek-v4-1": "no config.json of DeepSeek-V4.1 was found, and whether it has the shapes of V4 nobody says",
    "qwen3-8-flash-next": UNKNOWN["qwen4_exp"],
    "llama-3-2-11b-vision": UNKNOWN["mllama"],
    "llama-3-2-90b-vision": UNKNOWN["mllama"],
}
"""Names whose models can't be planned, and what isn't known about them."""


def find_checkpoint(wanted: str, facts: Facts) -> Checkpoint:
    """Raises ConfigError that says what was looked for."""
    path = Path(wanted)
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return safetensors_checkpoint(path)
        path = _in_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return gguf_checkpoint(path)
    if path.suffix == ".json" and path.is_file():
        return checkpoint_of(read_json(path), str(path), name=path.parent.name or path.stem)
    if path.suffix in {".json", ".gguf", ".safetensors"}:
        raise ConfigError(f"--model {wanted}: there is no such file")
    return _named(wanted, facts)


def _in_folder(folder: Path) -> Path:
    """Its config.json, else its one GGUF file (the first of its parts). Raises ConfigError where there are several."""
    config = folder / "config.json"
    files = sorted(folder.glob("*.gguf"))
    whole = [file for file in files if not _LATER_PART.search(file.name)]
    if config.is_file() or not files:
        return config
    if len(whole) != 1:
        names = ", ".join(file.name for file in (whole or files)[:5])
        raise ConfigError(f"--model {folder}: {len(whole)} GGUF models lie there ({names}); give the file")
    return whole[0]


def _named(wanted: str, facts: Facts) -> Checkpoint:
    table, squeezed = _table(facts), _squeezed_table(facts)
    weights, unsure = _gguf_weights(_plain(wanted))
    shorter = list(_shorter(_plain(wanted)))
    for name, meant in shorter:
        weights = weights or meant
        found = table.get(name) or squeezed.get(name.replace("-", ""))
        if found is not None:
            return _checkpoint(wanted, found, weights, (*unsure, *_other_context(wanted, found)))
    name = shorter[-1][0]
    ends = [known for known in table if name.endswith(f"-{known}") and _SIZED.search(known)]
    if ends and not _PART.search(name):
        found = table[max(ends, key=len)]
        unsure = (*unsure, f"that it has the shapes of {found.name}, which its name ends in")
        return _checkpoint(wanted, found, weights, unsure)
    near = difflib.get_close_matches(_plain(wanted), table, n=3, cutoff=0.5)
    names = dict.fromkeys(table[name].name for name in near)
    why = next((said for start, said in UNPUBLISHED.items() if _plain(wanted).startswith(start)), "")
    raise ConfigError(
        f"--model {wanted}: no file, and no model of that name is known"
        + (f": {why}; {IN_KNOWN_TERMS}" if why else "")
        + (f"; near it are {', '.join(names)}" if names else "")
        + "; give its config.json, a folder of safetensors or a GGUF file"
    )


def _gguf_weights(name: str) -> tuple[str | None, tuple[str, ...]]:
    """What a file's type at the end of a name says about the weights, and what about that isn't sure."""
    ending = _GGUF_TYPE.search(name)
    if ending is None:
        return None, ()
    found = gguf_type(ending[1])
    if found is None:
        return None, (f"the weights: nobody knows here what {ending[1]} takes, so they are in the model's own format",)
    kind, is_known = found
    return f"gguf:{kind}", () if is_known else (f"the weights: planned as {kind}, the nearest known to {ending[1]}",)


_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_SIZED = re.compile(r"-\d+(-\d+)?[bm](-|$)")
_PART = re.compile(r"\b(eagle3?|draft\w*|dflash\w*|mtp|speculator\w*|lora|adapter|pruned|reap|reward|classifier)\b")
"""Names of what isn't the whole model though its name ends in one."""


def _checkpoint(wanted: str, found: KnownModel, weights: str | None, unsure: tuple[str, ...]) -> Checkpoint:
    shown = _shown(wanted, found)
    made = checkpoint_of(found.config, found.source, name=shown, uncertain=(*found.uncertain, *unsure))
    return msgspec.structs.replace(made, as_of=found.as_of.isoformat(), weights=weights or made.weights)


@cache
def _table(facts: Facts) -> dict[str, KnownModel]:
    table: dict[str, KnownModel] = {}
    for model in reversed(facts.models):
        for name in (*model.aliases, model.name):
            table[_plain(name)] = model
    for model in facts.models:
        for name in (model.name, *model.aliases):
            for shorter, _ in _shorter(_plain(name)):
                table.setdefault(shorter, model)
    return table


@cache
def _squeezed_table(facts: Facts) -> dict[str, KnownModel]:
    """`llama3.1:8b` and `Llama-3.1-8B` are one. Where two models come to one text, neither is found by it."""
    found: dict[str, KnownModel] = {}
    twice = set()
    for name, model in _table(facts).items():
        text = name.replace("-", "")
        if found.setdefault(text, model) is not model:
            twice.add(text)
    return {text: model for text, model in found.items() if text not in twice}


def _shown(wanted: str, found: KnownModel) -> str:
    """The known name, with what was asked for where that is another model of the same shapes."""
    same = _plain(found.name).startswith(_plain(wanted)) or _plain(wanted).startswith(_plain(found.name))
    return found.name if same else f"{wanted} (shapes of {found.name})"


_SAME_CONTEXT = re.compile(r"(-(instruct|it|chat|hf|base|fp8|dynamic|bf16|awq|gptq|int4|nvfp4|gguf))*")


def _other_context(wanted: str, found: KnownModel) -> tuple[str, ...]:
    """Later releases of one shape often read further."""
    name, known = _plain(wanted), _plain(found.name)
    same = known.startswith(name) or (name.startswith(known) and _SAME_CONTEXT.fullmatch(name[len(known) :]))
    return () if same else (f"the context length, which is that of {found.name}",)


def _plain(name: str) -> str:
    return re.sub(r"[\s_.:/]+", "-", name.casefold().rsplit("/", 1)[-1]).strip("-")


def _shorter(name: str) -> Iterator[tuple[str, str | None]]:
    """The name, then without its last ending and what that means, and so on."""
    yield name, None
    while True:
        head, _, ending = name.rpartition("-")
        if not head or not (ending in _ENDINGS or _GGUF_ENDING.fullmatch(ending) or _RELEASED.fullmatch(ending)):
            return
        name = head
        yield name, _ENDINGS.get(ending)
