"""gguf.py: good headers are read, broken ones are named, mutated ones never do more than that."""

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import _BLOCKS, read_header
from hitsend.serve.engine.shape import memory_shape


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, form: str, value: Any) -> bytes:
    return text(name) + struct.pack("<I", kind) + (text(value) if kind == 8 else struct.pack("<" + form, value))


def tensor(name: str, dimensions: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, kind, offset)


def file(
    keys: list[bytes], tensors: list[bytes], data: bytes = b"", *, num_keys: int | None = None, magic: bytes = b"GGUF"
) -> bytes:
    count = len(keys) if num_keys is None else num_keys
    head = magic + struct.pack("<IQQ", 3, len(tensors), count) + b"".join(keys) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


NAME = key("general.architecture", 8, "", "llama")
GOOD = file([NAME], [tensor("a", [32, 2], 2, 0)], b"\0" * 64)


def read(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return read_header(str(path))


def test_a_good_header_is_read(tmp_path: Path) -> None:
    header = read(tmp_path / "m.gguf", GOOD)
    assert (header.architecture, header.num_tensors, header.tensor_bytes) == ("llama", 1, 36)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"GG", "starts with"),
        (file([], [], magic=b"GGML"), "starts with b'GGML'"),
        (GOOD[:4] + struct.pack("<I", 99) + GOOD[8:], "version 99"),
        (GOOD[:8] + struct.pack("<Q", 2**63) + GOOD[16:], "9223372036854775808 tensors"),
        (file([NAME], [], num_keys=70_000), "70000 keys"),
        (GOOD[:40], "it ends at byte"),
        (file([NAME, NAME], []), "twice"),
        (file([text("k") + struct.pack("<I", 77)], []), "unknown type 77"),
        (file([text("k") + struct.pack("<IIQ", 9, 8, 2**60)], []), "strings reaches beyond"),
        (file([text("k") + struct.pack("<IIQ", 9, 10, 2**60)], []), "inside a value"),
        (file([text("k") + struct.pack("<IIQ", 9, 9, 1)], []), "array of unknown type 9"),
        (file([struct.pack("<Q", 2**62)], []), "a string of 4611686018427387904 bytes"),
        (file([NAME], [tensor("a", [32], 0, 0)], b"\0" * 127), "tensor 'a' ends at byte"),
        (file([NAME], [tensor("a", [32], 0, 2**63)], b"\0" * 128), "tensor 'a' ends at byte"),
        (file([NAME], [tensor("a", [2**40, 2**40], 0, 0)]), "elements, limit"),
        (file([NAME], [tensor("a", [0], 0, 0)]), "0 elements"),
        (file([NAME], [tensor("a", [33], 2, 0)], b"\0" * 64), "no multiple of its block of 32"),
        (file([NAME], [tensor("a", [32], 200, 0)], b"\0" * 64), "unknown type 200"),
        (file([NAME], [tensor("a", [1] * 5, 0, 0)], b"\0" * 64), "5 dimensions"),
        (file([NAME], [tensor("a", [8], 0, 7)], b"\0" * 64), "no multiple of 32"),
        (file([NAME], [tensor("a", [16], 0, 0), tensor("b", [8], 0, 32)], b"\0" * 64), "overlap"),
        (file([NAME, key("general.alignment", 4, "I", 0)], []), "not a power of two"),
    ],
)
def test_a_broken_header_is_refused_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"not a usable GGUF file") as failure:
        read(tmp_path / "m.gguf", content)
    assert reason in str(failure.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(ConfigError, match="can't read"):
            read_header(str(path))


def test_the_type_table_agrees_with_the_gguf_package() -> None:
    known = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: known.get(kind) for kind in _BLOCKS} == _BLOCKS


def written(path: Path) -> bytes:
    """A small real file with arrays and several tensors."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_token_list([f"t{i}" for i in range(40)])
    writer.add_token_types([1] * 40)
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"):
        writer.add_tensor(name, np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def mutated(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        changed = changed or bytearray(b"G")
        at = rng.randrange(min(len(changed), 1400))
        match rng.randrange(4):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
            case 2:
                del changed[at : at + rng.randint(1, 64)]
            case _:
                changed = changed[: max(1, at)]
    return bytes(changed)


def test_two_thousand_mutated_headers_give_a_header_or_a_reason(tmp_path: Path) -> None:
    content = written(tmp_path / "good.gguf")
    rng = random.Random(7)
    refused = 0
    for _ in range(2000):
        try:
            header = read(tmp_path / "m.gguf", mutated(content, rng))
            memory_shape(header)
        except ConfigError:
            refused += 1
    assert 200 < refused < 2000


LOADER = """
import sys
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.libllama import open_library
from hitsend.serve.engine.vocabulary import LoadedModel
library = open_library()
for path in sys.argv[1:]:
    try:
        read_header(path)
        LoadedModel(library, path).close()
    except ConfigError:
        pass
    print(path, flush=True)
"""


@pytest.mark.model
def test_what_passes_the_sieve_can_kill_no_more_than_a_child(tmp_path: Path) -> None:
    """Three hundred mutated files go to libllama itself. It may refuse; if it dies, only its own process does."""
    content = written(tmp_path / "good.gguf")
    rng = random.Random(11)
    paths = []
    for i in range(300):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(mutated(content, rng))
        paths.append(str(path))
    deaths = 0
    while paths:
        command = [sys.executable, "-c", LOADER, *paths]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        done = len(ended.stdout.split())
        deaths += ended.returncode != 0
        paths = paths[done + 1 :] if ended.returncode else []
    print(f"libllama died {deaths} times over 300 mutated files")
