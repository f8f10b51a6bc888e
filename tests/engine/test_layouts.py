"""engine/requantise.py, convert.py and layouts.py: weights in another layout, on random blocks and tiny files."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufTensor, read_header, read_map
from hitsend.serve.engine import convert as conversion
from hitsend.serve.engine import requantise as codec
from hitsend.serve.engine.convert import NoRoom
from hitsend.serve.engine.layouts import converted, converted_path, discard, hold, layouts_dir, measuring_alone
from hitsend.serve.engine.libllama import Library, open_library
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.tuned import Measured, Tuned, Way, tuned_file
from hitsend.serve.engine.weights import laid_out
from hitsend.settings import EngineSettings
from tests.limited import no_file_may_grow

KINDS = {
    codec.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    codec.Q8_0: gguf.GGMLQuantizationType.Q8_0,
    codec.Q4_K: gguf.GGMLQuantizationType.Q4_K,
    codec.IQ4_NL: gguf.GGMLQuantizationType.IQ4_NL,
}

# Largest error of a weight as a share of the largest weight in its block.
BOUNDS = {codec.Q8_0: 0.5 / 127 + 1e-3, codec.Q4_0: 1 / 8 + 1e-3, codec.IQ4_NL: 1 / 7, codec.Q4_K: 1 / 7}


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


def some_weights(seed: int, rows: int = 16, width: int = 512) -> np.ndarray:
    """Bell-shaped, with rows of very different size, an outlier each, and a row of zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, width)) * 10.0 ** random.integers(-2, 2, (rows, 1))
    values[:, 7] *= 6
    values[3] = 0
    return values.astype(np.float32)


def as_q4_1(seed: int, times: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Q4_1 and what they stand for."""
    rows = gguf.quantize(times * some_weights(seed), gguf.GGMLQuantizationType.Q4_1)
    return rows, gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_near_what_it_was_and_zero_stays_zero(library, kind, seed):
    values = some_weights(seed)
    found = gguf.dequantize(codec.quantise(library, values, kind), KINDS[kind])
    blocks = (-1, codec.BLOCK[kind])
    largest = np.abs(values).reshape(blocks).max(1)
    assert (np.abs(found - values).reshape(blocks).max(1) <= BOUNDS[kind] * largest + 1e-7).all()
    assert (found[3] == 0).all()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_stored_rows_are_read_as_the_reference_reads_them(library, name):
    kind = gguf.GGMLQuantizationType[name]
    rows = gguf.quantize(some_weights(1), kind)
    read = codec.dequantise(library, rows.view(np.uint8), int(kind), width=512)
    np.testing.assert_allclose(read, gguf.dequantize(rows, kind), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_q4_1_becomes_q4_k_with_a_fraction_of_the_error_of_a_new_lattice(library, seed):
    rows, values = as_q4_1(seed)
    own = gguf.dequantize(
        codec.requantise(library, rows, codec.Q4_1, codec.Q4_K, width=512), gguf.GGMLQuantizationType.Q4_K
    )
    new = gguf.dequantize(
        codec.requantise(library, rows, codec.Q4_1, codec.Q4_0, width=512), gguf.GGMLQuantizationType.Q4_0
    )
    assert np.square(own - values).sum() < 0.1 * np.square(new - values).sum()
    assert (own[3] == 0).all()


@pytest.mark.parametrize("least", [0.5, -0.25])
def test_a_q4_1_block_on_one_side_of_zero_or_counting_downwards_is_kept_too(library, least):
    block = np.zeros((1, 8, 20), np.uint8)
    scale = -0.125 if least > 0 else 0.0625
    block[..., :4] = np.array([scale, least], "<f2").view(np.uint8)
    block[..., 4:] = np.arange(16, dtype=np.uint8) * 17
    rows = block.reshape(1, -1)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType.Q4_1)
    stored = codec.requantise(library, rows, codec.Q4_1, codec.Q4_K, width=256)
    found = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_K)
    assert np.abs(found - values).max() <= 0.05 * np.abs(values).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number_is_refused(library, bad):
    values = some_weights(0)
    values[5, 100] = bad
    with pytest.raises(ConfigError, match="not a finite number"):
        codec.requantise(library, values.view(np.uint8), codec.F32, codec.Q8_0, width=512)


def tiny(path: Path, *, bad: bool = False, **keys: int) -> Path:
    """A GGUF file with the kinds of tensors that matter, of two widths."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_token_list(["<a>", "b", "c"])
    writer.add_chat_template("{{ messages }}")
    for key, value in keys.items():
        writer.add_uint16(key.replace("__", "."), value)
    wide, narrow = some_weights(0, 8, 512), some_weights(1, 16, 96)
    if bad:
        wide[2, 5] = np.inf
    q4_1 = gguf.GGMLQuantizationType.Q4_1
    writer.add_tensor("token_embd.weight", narrow)
    writer.add_tensor("blk.0.attn_norm.weight", narrow[0])
    writer.add_tensor("blk.0.ffn_gate_inp.weight", narrow)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(narrow, q4_1), raw_dtype=q4_1)
    if bad:
        writer.add_tensor("blk.0.ffn_down.weight", wide)
    else:
        writer.add_tensor("blk.0.ffn_down.weight", gguf.quantize(wide, q4_1), raw_dtype=q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def kinds_in(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(
    ("recipe", "embedding", "narrow", "wide"),
    [("q8_0", "Q8_0", "Q8_0", "Q8_0"), ("q4_0", "Q8_0", "Q4_0", "Q4_0"), ("q4_k", "Q8_0", "Q4_1", "Q4_K")],
)
def test_a_file_is_converted_by_its_recipe_and_keeps_its_keys(tmp_path, recipe, embedding, narrow, wide):
    source = tiny(tmp_path / "tiny.gguf")
    said: list[str] = []
    target = converted(source, tmp_path / "models", recipe, libllama=None, say=said.append)
    assert kinds_in(target) == {
        "token_embd.weight": embedding,
        "blk.0.attn_norm.weight": "F32",
        "blk.0.ffn_gate_inp.weight": "F32",
        "blk.0.attn_q.weight": narrow,
        "blk.0.ffn_down.weight": wide,
    }
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(target)
    for name, field in before.fields.items():
        if not name.startswith("GGUF."):
            assert after.fields[name].contents() == field.contents()
    keys = read_header(str(target)).metadata
    assert keys["hitsend.layout"] == recipe
    assert keys["hitsend.layout.source_file"] == "tiny.gguf"
    assert len(keys["hitsend.layout.source_sha256"]) == 64
    for mine, theirs in zip(after.tensors, before.tensors, strict=True):
        was = gguf.dequantize(theirs.data, theirs.tensor_type)
        found = gguf.dequantize(mine.data, mine.tensor_type)
        assert np.abs(found - was).max() <= 0.13 * np.abs(was).max()
    assert any("100 %" in line for line in said)


def test_it_is_converted_once_and_again_when_the_source_changes(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    said: list[str] = []

    def ask() -> Path:
        return converted(source, tmp_path / "models", "q8_0", libllama=None, say=said.append)

    first = ask()
    count = len(said)
    assert ask() == first
    assert len(said) == count
    tiny(source, extra__key=1)
    assert ask() != first
    assert len(said) > count


def test_two_at_once_convert_once(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    said: list[str] = []
    ways = [
        threading.Thread(target=lambda: converted(source, tmp_path / "models", "q8_0", libllama=None, say=said.append))
        for _ in range(2)
    ]
    for way in ways:
        way.start()
    for way in ways:
        way.join(timeout=60)
    assert sum("converting" in line for line in said) == 1


def test_what_a_server_runs_on_is_not_deleted(tmp_path):
    source, models = tiny(tmp_path / "tiny.gguf"), tmp_path / "models"
    for recipe in ("q8_0", "q4_0"):
        converted(source, models, recipe, libllama=None, say=lambda _: None)
    hold(source, models, "q8_0")
    for recipe in ("q8_0", "q4_0"):
        discard(source, models, recipe)
    assert [converted_path(source, models, recipe).exists() for recipe in ("q8_0", "q4_0")] == [True, False]
    left = converted_path(source, models, "q4_k").with_suffix(".12345.part")
    left.write_bytes(b"GGUF half")
    discard(source, models, "q4_k")
    assert not left.exists()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    models = tmp_path / "models"
    models.mkdir()
    layouts_dir(models).write_text("a file")
    refused = r"engine.layout: can't use .*layouts: File exists"
    with pytest.raises(ConfigError, match=refused):
        converted(source, models, "q8_0", libllama=None, say=lambda _: None)
    with pytest.raises(ConfigError, match=refused), measuring_alone(models, lambda _: None):
        pass


def files_in(folder: Path) -> set[str]:
    return {file.suffix for file in folder.iterdir()}


def test_a_conversion_that_fails_half_way_leaves_nothing(tmp_path):
    source = tiny(tmp_path / "bad.gguf", bad=True)
    with pytest.raises(ConfigError, match=r"not a finite number \(in blk\.0\.ffn_down\.weight\)"):
        converted(source, tmp_path / "models", "q8_0", libllama=None, say=lambda _: None)
    assert files_in(layouts_dir(tmp_path / "models")) <= {".json", ".lock"}


def test_what_a_killed_process_left_is_never_loaded_and_is_cleaned_up(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    target = converted_path(source, tmp_path / "models", "q8_0")
    left = target.with_suffix(".12345.part")
    left.write_bytes(b"GGUF half")
    assert converted(source, tmp_path / "models", "q8_0", libllama=None, say=lambda _: None) == target
    assert not left.exists()
    assert kinds_in(target)["blk.0.attn_q.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: b"GGML" + data[4:], "it starts with"),
        (lambda data: data[:-40], "ends at byte"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "limits"),
    ],
)
def test_a_hostile_file_is_refused_in_the_child_and_leaves_nothing(tmp_path, damage, why):
    source = tmp_path / "hostile.gguf"
    source.write_bytes(damage(tiny(tmp_path / "tiny.gguf").read_bytes()))
    with pytest.raises(ConfigError, match=why):
        converted(source, tmp_path / "models", "q8_0", libllama=None, say=lambda _: None)
    assert files_in(layouts_dir(tmp_path / "models")) <= {".json", ".lock"}


def test_a_part_of_a_split_model_and_a_converted_file_are_no_sources(tmp_path):
    part = tiny(tmp_path / "part.gguf", split__count=3)
    with pytest.raises(ConfigError, match="one part of several"):
        converted(part, tmp_path / "models", "q8_0", libllama=None, say=lambda _: None)
    once = converted(tiny(tmp_path / "a.gguf"), tmp_path / "models", "q8_0", libllama=None, say=lambda _: None)
    with pytest.raises(ConfigError, match="converted already"):
        converted(once, tmp_path / "models", "q4_0", libllama=None, say=lambda _: None)


def test_nothing_to_change_and_no_room_are_said(tmp_path):
    with pytest.raises(ConfigError, match="q4_k changes nothing"):
        conversion.plan((GgufTensor("blk.0.attn_q.weight", 0, 960, codec.Q4_1, 1536, (96, 16)),), "q4_k")
    with pytest.raises(ConfigError, match=r"takes \d+ bytes .* has room for \d+"):
        conversion._check_room(tmp_path, 2**60)


def test_a_disk_that_fills_up_leaves_no_half_file_and_auto_serves_as_shipped(tmp_path):
    source, models = tiny(tmp_path / "tiny.gguf"), tmp_path / "models"
    found, auto = ModelFile(str(source), "tiny", "path"), EngineSettings(layout="auto")
    folder, said = layouts_dir(models), []
    with no_file_may_grow(2048):  # beyond its keys, within its weights
        for layout in ("q8_0", "q4_0+offsets"):
            with pytest.raises(NoRoom, match=r"engine\.layout: can't write .*\.gguf: File too large"):
                laid_out(found, models, EngineSettings(layout=layout), said.append)
        assert laid_out(found, models, auto, said.append) == found
        assert not list(folder.glob("*.gguf")) + list(folder.glob("*.part")) + list(folder.glob("tuned-*"))
    assert said[-1].startswith("layout auto: as shipped, since no other can be had: engine.layout: can't write ")
    shipped = Measured(Way(), 200.0, {1: 80.0}, 0.0, 0.0, 2, 2, alone=90.0)
    faster = Measured(Way("q8_0"), 400.0, {1: 160.0}, 0.0, 0.0, 1, 1, gain=2.0)
    known = Tuned("m", "here", "b", 10.0, 48, (shipped, faster))
    tuned_file(found, models, auto).write_bytes(msgspec.json.encode(known))
    with no_file_may_grow(2048):
        assert laid_out(found, models, auto, said.append) == found
    assert laid_out(found, models, auto, said.append).weights is not None


def test_many_rows_are_converted_in_portions_that_fit_together(library, tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    _, lies = read_map(str(source))
    for step in conversion.plan(lies.tensors, "q8_0"):
        whole, pieces = (
            list(conversion._portions(source.read_bytes(), lies.data_at, step, library, portion_bytes=size))
            for size in (2**20, 1024)
        )
        assert b"".join(whole) == b"".join(pieces)
        assert len(whole) == 1
        assert len(b"".join(whole)) == step.num_bytes
        assert len(pieces) > 1 or "norm" in step.tensor.name


def test_the_child_alone_says_why_and_exits(tmp_path):
    words = ["-m", "hitsend.serve.engine.convert", str(tmp_path / "none.gguf"), str(tmp_path / "t"), "q8_0", "0" * 64]
    child = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
    )
    assert child.returncode == 1
    assert "can't read" in child.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_map_agrees_with_the_reference_reader(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    _, lies = read_map(str(source))
    reader = gguf.GGUFReader(source)
    assert lies.data_at == reader.data_offset
    assert [(t.name, lies.data_at + t.offset, t.num_bytes, t.dimensions) for t in lies.tensors] == [
        (t.name, t.data_offset, t.n_bytes, tuple(int(n) for n in t.shape)) for t in reader.tensors
    ]
