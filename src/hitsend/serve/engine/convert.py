"""A GGUF file written again with its weights in another layout; a process of its own.

    python -m hitsend.serve.engine.convert SOURCE TARGET RECIPE SHA256 [LIBLLAMA]

Enters: a model file and a recipe. Leaves: the target, and a line on stdout now and then; exit code 1 with the reason
on stderr, or `NO_ROOM` where it isn't the file's fault but that of the folder. Always true: the source is judged by
`gguf.py` before anything is written; its keys (words, template, sizes) are copied byte for byte and three are added
that say what the file came from; no more than `PORTION_BYTES` of weights are in memory at once; the target is written
beside its place and moved there when it is whole. Next: `layouts.py`.

    recipe     which matrices become what
    bf16       all of them BF16: most bytes, and activations aren't rounded to 8 bits
    q8_0       all of them Q8_0
    q4_0       those of the layers Q4_0; words in and out Q8_0
    iq4_nl     the same with IQ4_NL, whose steps fit bell-shaped weights better
    q4_k       those of the layers Q4_K where their rows are whole blocks of 256; words in and out Q8_0
    q4_0+offsets  Q4_1 ones of the layers Q4_0 with the same steps, and what that leaves out in a second file
               (`offsets.py`); all others stay
"""

import mmap
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, GgufMap, GgufTensor, bytes_of, read_map
from hitsend.serve.engine import offsets
from hitsend.serve.engine.libllama import Library, die_with_parent, open_library
from hitsend.serve.engine.offsets import FILE_KEY, LAYOUT_KEY, SOURCE_KEY, text
from hitsend.serve.engine.requantise import (
    BF16,
    BLOCK,
    F16,
    F32,
    IQ4_NL,
    Q4_0,
    Q4_1,
    Q4_K,
    Q8_0,
    READABLE,
    Bytes,
    requantise,
)

RECIPES = {"bf16": BF16, "q8_0": Q8_0, "q4_0": Q4_0, "iq4_nl": IQ4_NL, "q4_k": Q4_K, offsets.RECIPE: Q4_0}

PORTION_BYTES = 64 * 1024 * 1024
"""Of a tensor as 32-bit numbers."""

_LONG_BYTES = 1_000_000_000
"""Weights of which progress is worth more than one line."""

NO_ROOM = 3
"""Exit code where the target can't be written."""

_MARGIN_BYTES = 64 * 1024 * 1024
_STRING = 8
_SMALL = ("norm", "_inp.", "ssm_", "conv", "nextn", "shexp_gate")
_WIDE, _PRECISE = frozenset((F32, F16, BF16)), frozenset((BF16, Q8_0))


class NoRoom(ConfigError):
    """The target can't be written now; at another time it might be."""


class Step(msgspec.Struct, frozen=True):
    """One tensor and the type that it gets; None leaves it as it is. `is_split`: what it leaves out goes elsewhere."""

    tensor: GgufTensor
    wanted: int | None
    is_split: bool = False

    @property
    def num_bytes(self) -> int:
        """What it will take."""
        elements = int(np.prod(self.tensor.dimensions, dtype=object))
        return self.tensor.num_bytes if self.wanted is None else bytes_of(self.wanted, elements)


def plan(tensors: tuple[GgufTensor, ...], recipe: str, architecture: str = "llama") -> list[Step]:
    """What becomes of each tensor, in the file's order. Raises ConfigError where nothing would change."""
    if recipe == offsets.RECIPE:
        steps = [_split(tensor, architecture) for tensor in tensors]
    else:
        steps = [Step(tensor, _wanted(tensor, RECIPES[recipe])) for tensor in tensors]
    if all(step.wanted is None for step in steps):
        raise ConfigError(f"engine.layout: {recipe} changes nothing in this model")
    return steps


def _split(tensor: GgufTensor, architecture: str) -> Step:
    is_split = tensor.kind == Q4_1 and architecture in offsets.ARCHITECTURES and offsets.is_splittable(tensor)
    return Step(tensor, Q4_0 if is_split else None, is_split)


def _wanted(tensor: GgufTensor, kind: int) -> int | None:
    is_matrix = len(tensor.dimensions) > 1 and tensor.name.endswith(".weight")
    if not is_matrix or tensor.kind not in READABLE or any(part in tensor.name for part in _SMALL):
        return None
    if not tensor.name.startswith("blk."):
        # words in and out: the most sensitive of all, and often already small
        kind = kind if kind in _PRECISE else Q8_0 if tensor.kind in _WIDE else tensor.kind
    if tensor.kind == kind or tensor.dimensions[0] % BLOCK.get(kind, 1):
        return None
    return kind


def convert(library: Library, source: str, target: Path, recipe: str, sha256: str) -> None:
    """Write the target. Raises ConfigError."""
    header, lies = read_map(source)
    if header.metadata.get("split.count", 1) != 1:
        raise ConfigError(f"engine.layout: {source} is one part of several; only whole files can be converted")
    if LAYOUT_KEY in header.metadata:
        raise ConfigError(f"engine.layout: {source} was converted already ({header.metadata[LAYOUT_KEY]})")
    steps = plan(lies.tensors, recipe, header.architecture)
    beside = [step.tensor for step in steps if step.is_split]
    _check_room(target.parent, sum(step.num_bytes for step in steps) + lies.data_at + offsets.num_bytes(beside))
    keys = _new_keys(header, source, recipe, sha256)
    with Path(source).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if beside:  # first: whoever sees the weights has to find it
            with _whole(offsets.offsets_path(target)) as out:
                out.write(offsets.head_of(header, beside, keys))
                out.write(b"\0" * (-out.tell() % offsets.ALIGNMENT))
                _write_offsets(out, data, lies, beside, library)
        try:
            with _whole(target) as out:
                _write_head(out, data, lies, steps, keys)
                _write_tensors(out, data, lies, steps, library)
        except ConfigError:
            offsets.offsets_path(target).unlink(missing_ok=True)
            raise


@contextmanager
def _whole(target: Path) -> Iterator[BinaryIO]:
    """A file that is at its place when all of it was written, and not before. Raises ConfigError."""
    part = target.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        part.replace(target)
    except OSError as failure:
        raise NoRoom(f"engine.layout: can't write {target}: {failure.strerror}") from failure
    finally:
        part.unlink(missing_ok=True)


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _MARGIN_BYTES > free:
        raise NoRoom(
            f"engine.layout: the converted file takes {needed} bytes and {_MARGIN_BYTES} shall stay free, "
            f"{folder} has room for {free}"
        )


def _new_keys(header: GgufHeader, source: str, recipe: str, sha256: str) -> list[tuple[str, str]]:
    taken = {LAYOUT_KEY: recipe, SOURCE_KEY: sha256, FILE_KEY: Path(source).name}
    return [(key, value) for key, value in taken.items() if key not in header.metadata]


def _write_head(out: BinaryIO, data: mmap.mmap, lies: GgufMap, steps: list[Step], keys: list[tuple[str, str]]) -> None:
    out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(steps), lies.num_keys + len(keys)))
    out.write(data[lies.keys_at : lies.keys_end])
    out.writelines(text(key) + struct.pack("<I", _STRING) + text(value) for key, value in keys)
    offset = 0
    for step in steps:
        tensor = step.tensor
        shape = tensor.dimensions
        out.write(text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        out.write(struct.pack("<IQ", tensor.kind if step.wanted is None else step.wanted, offset))
        offset += -(-step.num_bytes // lies.alignment) * lies.alignment


def _write_tensors(out: BinaryIO, data: mmap.mmap, lies: GgufMap, steps: list[Step], library: Library) -> None:
    whole, done, said = sum(step.tensor.num_bytes for step in steps), 0, 0
    out.write(b"\0" * (-out.tell() % lies.alignment))
    for step in steps:
        out.writelines(_portions(data, lies.data_at, step, library))
        out.write(b"\0" * (-out.tell() % lies.alignment))
        done += step.tensor.num_bytes
        if done * 10 // whole > said and (done == whole or whole >= _LONG_BYTES):
            said = done * 10 // whole
            print(f"{said * 10} % of {whole / 1e6:.0f} MB", flush=True)  # noqa: T201 (its parent reads these lines)


def _write_offsets(out: BinaryIO, data: mmap.mmap, lies: GgufMap, tensors: list[GgufTensor], library: Library) -> None:
    for tensor in tensors:
        out.write(offsets.block_sums(tensor.dimensions[0]).tobytes())
        out.write(b"\0" * (-out.tell() % offsets.ALIGNMENT))
        for rows in _rows(data, lies.data_at, tensor, PORTION_BYTES):
            with _named(tensor):
                out.write(offsets.stored_offsets(library, rows, tensor.dimensions[0]).tobytes())
        out.write(b"\0" * (-out.tell() % offsets.ALIGNMENT))


@contextmanager
def _named(tensor: GgufTensor) -> Iterator[None]:
    """Whose fault it was."""
    try:
        yield
    except ConfigError as failure:
        raise ConfigError(f"{failure} (in {tensor.name})") from None


def _rows(data: mmap.mmap | bytes, data_at: int, tensor: GgufTensor, portion_bytes: int) -> Iterator[Bytes]:
    """The tensor as it is stored, some rows at a time."""
    width = tensor.dimensions[0]
    start, end = data_at + tensor.offset, data_at + tensor.offset + tensor.num_bytes
    row_bytes = bytes_of(tensor.kind, width)
    portion = max(1, portion_bytes // (width * 4)) * row_bytes
    for at in range(start, end, portion):
        yield np.frombuffer(data[at : min(at + portion, end)], np.uint8).reshape(-1, row_bytes)


def _portions(
    data: mmap.mmap | bytes, data_at: int, step: Step, library: Library, *, portion_bytes: int = PORTION_BYTES
) -> Iterator[bytes]:
    """The tensor's bytes as they are to be stored, some rows at a time."""
    tensor = step.tensor
    for rows in _rows(data, data_at, tensor, portion_bytes):
        with _named(tensor):
            if step.wanted is None:
                made = rows
            elif step.is_split:
                made = offsets.without_offsets(rows)
            else:
                made = requantise(library, rows, tensor.kind, step.wanted, width=tensor.dimensions[0])
        yield made.tobytes()


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    die_with_parent()
    source, target, recipe, sha256, *rest = arguments
    try:
        convert(open_library(rest[0] if rest else None), source, Path(target), recipe, sha256)
    except ConfigError as failure:
        print(failure, file=sys.stderr)  # noqa: T201 (its parent reads it)
        return NO_ROOM if isinstance(failure, NoRoom) else 1
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the library's own destructors may log into a Python that is already gone.
    os._exit(exit_code)
