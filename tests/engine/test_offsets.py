"""engine/offsets.py: Q4_0 and an adapter give Q4_1's numbers, are whole or not there, and are never parted."""

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufTensor, read_header
from hitsend.serve.engine import convert as conversion
from hitsend.serve.engine import offsets
from hitsend.serve.engine.adapters import Adapters, check_adapter
from hitsend.serve.engine.embedding_messages import OpenEmbedder
from hitsend.serve.engine.embedding_worker import EmbeddingWorker
from hitsend.serve.engine.layouts import converted, discard, layouts_dir
from hitsend.serve.engine.libllama import Library, open_library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.loading import load
from hitsend.serve.engine.requantise import Q4_1
from hitsend.serve.engine.shape import CellPlan
from hitsend.serve.engine.sizing import size
from hitsend.serve.engine.speculating import speculator_for
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch
from hitsend.settings import AdapterSettings
from tests.engine.conftest import SMALL
from tests.engine.lora import write_lora
from tests.engine.test_layouts import as_q4_1, files_in, kinds_in, tiny

RECIPE = offsets.RECIPE


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


def values(rows: np.ndarray, kind: str) -> np.ndarray:
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])


def make(source: Path, folder: Path) -> Path:
    return converted(source, folder, RECIPE, libllama=None, say=lambda _: None)


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shrunk", [1.0, 1e-3])
def test_the_two_parts_add_up_to_the_weights(library, seed, shrunk):
    rows, _ = as_q4_1(seed, shrunk)
    whole = values(rows, "Q4_1")
    steps = values(offsets.without_offsets(rows), "Q4_0")
    sums, stored = offsets.block_sums(512), offsets.stored_offsets(library, rows, 512)
    found = steps + values(stored, "Q8_0") @ values(sums, "Q8_0") / offsets.TIMES
    beside = offsets.offsets_of(rows)
    # a row's offsets are kept to 1 / 254 of its biggest
    assert (np.abs(found - whole).max(1) <= np.abs(beside).max(1) / 200 + 1e-9).all()
    assert (np.abs(steps - whole).max(1)[:3] > np.abs(found - whole).max(1)[:3]).all()
    assert sums.shape[0] == stored.shape[1] // 34 * 32 == 32


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e4])
def test_what_is_no_number_or_too_far_away_is_refused(library, place, bad):
    rows, _ = as_q4_1(0)
    rows[5, 20 + place : 22 + place] = np.array([bad], "<f2").view(np.uint8)
    with pytest.raises(ConfigError, match="not a finite number|beside zero, limit 8000"):
        offsets.without_offsets(rows)
    with pytest.raises(ConfigError, match="not a finite number|beside zero, limit 8000"):
        offsets.stored_offsets(library, rows, 512)


def test_a_file_becomes_two_that_belong_together(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    target = make(source, tmp_path / "models")
    kinds = {"token_embd": "F32", "blk.0.attn_norm": "F32", "blk.0.ffn_gate_inp": "F32"}
    kinds |= {"blk.0.attn_q": "Q4_0", "blk.0.ffn_down": "Q4_0"}
    assert kinds_in(target) == {f"{name}.weight": kind for name, kind in kinds.items()}
    file = offsets.offsets_path(target)
    was, mine, beside = tensors_in(source), tensors_in(target), tensors_in(file)
    assert set(beside) == {f"blk.0.{name}.weight.lora_{part}" for name in ("attn_q", "ffn_down") for part in "ab"}
    for name, weights in was.items():
        found = mine[name]
        if f"{name}.lora_b" in beside:
            found = found + beside[f"{name}.lora_b"] @ beside[f"{name}.lora_a"] / offsets.TIMES
        assert np.abs(found - weights).max() <= 0.005 * np.abs(weights).max()
    header = read_header(str(target))
    assert header.metadata["hitsend.layout"] == RECIPE
    assert offsets.offsets_beside(str(target), header) == file
    assert offsets.offsets_bytes(str(target), header) == sum(t.n_bytes for t in gguf.GGUFReader(file).tensors)
    with pytest.raises(ConfigError, match=r"adapters\[offsets\]\.path: .* is a part of a model in the layout"):
        check_adapter(AdapterSettings("offsets", str(file)), "llama")
    discard(source, tmp_path / "models", RECIPE)
    assert files_in(layouts_dir(tmp_path / "models")) == {".json", ".lock", ".use"}


def test_weights_without_their_own_offsets_are_refused(tmp_path):
    target = make(tiny(tmp_path / "a.gguf"), tmp_path / "models")
    other = make(tiny(tmp_path / "b.gguf", extra__key=1), tmp_path / "models")
    header = read_header(str(target))
    offsets.offsets_path(other).replace(offsets.offsets_path(target))
    with pytest.raises(ConfigError, match="belong to other weights"):
        offsets.offsets_beside(str(target), header)
    offsets.offsets_path(target).unlink()
    with pytest.raises(ConfigError, match="its offsets are missing"):
        offsets.offsets_beside(str(target), header)
    assert offsets.offsets_beside(str(tmp_path / "a.gguf"), read_header(str(tmp_path / "a.gguf"))) is None


def test_a_split_file_is_refused_where_its_parts_cannot_be_brought_together(tmp_path):
    target = make(tiny(tmp_path / "a.gguf"), tmp_path / "models")
    for part in (target, offsets.offsets_path(target)):
        with pytest.raises(
            ConfigError, match=r"^engine\.embedding_model: .* in the layout q4_0\+offsets: use the file"
        ):
            EmbeddingWorker(OpenEmbedder(str(part), None, 0, 1))


def test_a_conversion_that_fails_leaves_neither_part(tmp_path):
    source = tiny(tmp_path / "tiny.gguf")
    data = bytearray(source.read_bytes())
    reader = gguf.GGUFReader(source)
    at = next(t.data_offset for t in reader.tensors if t.name == "blk.0.ffn_down.weight")
    data[at : at + 2] = np.array([np.nan], "<f2").tobytes()
    source.write_bytes(data)
    with pytest.raises(ConfigError, match=r"not a finite number \(in blk\.0\.ffn_down\.weight\)"):
        make(source, tmp_path / "models")
    assert files_in(layouts_dir(tmp_path / "models")) <= {".json", ".lock"}


@pytest.mark.parametrize(
    ("name", "dimensions", "architecture"),
    [
        ("token_embd.weight", (96, 16), "llama"),
        ("blk.0.ffn_down_exps.weight", (96, 16, 4), "llama"),
        ("blk.0.attn_qkv.weight", (96, 16), "llama"),
        ("blk.0.attn_q.weight", (96, 16), "qwen35"),  # not every product of its goes where adapters apply
    ],
)
def test_only_matrices_whose_products_take_adapters_are_split(name, dimensions, architecture):
    with pytest.raises(ConfigError, match="changes nothing"):
        conversion.plan((GgufTensor(name, 0, 960, Q4_1, 1536, dimensions),), RECIPE, architecture)


@pytest.mark.model
def test_the_model_computes_the_same_with_an_adapter_of_the_user_and_without(model_path, library, tmp_path):
    red = AdapterSettings("red", write_lora(tmp_path / "red.gguf", model_path, seed=0))
    target = make(Path(model_path), tmp_path)
    shipped, mine = logits_of(library, model_path, red), logits_of(library, str(target), red)
    bare = logits_of(library, str(target), red, is_bare=True)
    for name in (None, "red"):
        scale = np.abs(shipped[name]).mean()
        assert np.abs(mine[name] - shipped[name]).mean() < 0.06 * scale
        assert np.abs(bare[name] - shipped[name]).mean() > 0.2 * scale, "it is the offsets that make them equal"
    assert np.abs(mine["red"] - mine[None]).mean() > 2 * np.abs(mine["red"] - shipped["red"]).mean()
    whole = sum(file.stat().st_size for file in (target, offsets.offsets_path(target)))
    assert size(WorkerConfig("m", str(target), SMALL)).facts.weights_bytes == pytest.approx(whole, rel=0.03)
    drafting = msgspec.structs.replace(SMALL, speculation="draft", draft_model=str(target))
    beside = size(WorkerConfig("m", model_path, drafting)).memory.adapters
    assert beside == offsets.offsets_bytes(str(target), read_header(str(target))) > 0
    offsets.offsets_path(target).unlink()
    with pytest.raises(ConfigError, match=rf"^engine\.layout: {target} is q4_0\+offsets, .* missing"):
        size(WorkerConfig("m", str(target), SMALL))
    for use in (size, loaded):
        with pytest.raises(ConfigError, match=rf"^engine\.draft_model: {target} is q4_0\+offsets, .* missing"):
            use(WorkerConfig("m", model_path, drafting))


def loaded(config: WorkerConfig) -> None:
    """As the worker does it."""
    decoder, facts, _ = load(config, SystemClock())
    speculator_for(decoder, facts, config.settings, SystemClock())


def logits_of(
    library: Library, path: str, red: AdapterSettings, *, is_bare: bool = False
) -> dict[str | None, np.ndarray]:
    """Of some words; by adapter. `is_bare`: the weights alone, as if they were ordinary Q4_0."""
    model, header = LoadedModel(library, path), read_header(path)
    if is_bare:
        header = read_header(red.path)  # any that names no layout
    adapters = Adapters(model, header, path, (red,))
    decoder = LlamaDecoder(
        model, CellPlan(1, 256, 256), SystemClock(), step_tokens=64, num_threads=1, is_unified=False, adapters=adapters
    )
    ids = np.array(
        model.vocabulary.tokenize(b"The harbour lay quiet, and only one lamp was burning in the house."), np.int32
    )
    found: dict[str | None, np.ndarray] = {}
    for name in (None, "red", None):
        rows = decoder.decode(
            Batch(ids, np.arange(len(ids), dtype=np.int32), np.zeros(len(ids), np.int32), np.ones(len(ids), bool), name)
        )
        if name in found:
            np.testing.assert_array_equal(found[name], rows)
        found[name] = rows
        decoder.release(0)
    decoder.close()
    model.close()
    return found
