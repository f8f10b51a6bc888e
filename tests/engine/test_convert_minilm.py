"""A made-up BERT of one layer is converted, and read back by our own parser and by the library's author's."""

import json
import struct

import numpy as np
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.convert_minilm import convert, converted, read_safetensors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "ü"]


@pytest.fixture
def folder(tmp_path):
    config = {
        "model_type": "bert",
        "vocab_size": len(WORDS),
        "max_position_embeddings": 16,
        "hidden_size": 4,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
    }
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), 4),
        "embeddings.position_embeddings.weight": (16, 4),
        "embeddings.LayerNorm.bias": (4,),
        "encoder.layer.0.intermediate.dense.weight": (8, 4),
        "encoder.layer.0.output.LayerNorm.weight": (4,),
        "pooler.dense.weight": (4, 4),
    }
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for number, (name, shape) in enumerate(shapes.items()):
        values = np.arange(np.prod(shape), dtype="<f4").reshape(shape) + number
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return tmp_path


def test_what_was_in_the_package_is_in_the_file(folder):
    target = folder / "out.gguf"
    convert(folder, target)
    header = read_header(str(target))
    assert header.architecture == "bert"
    assert header.metadata["bert.pooling_type"] == 1
    assert header.metadata["tokenizer.ggml.bos_token_id"] == 2
    assert header.num_tensors == 5
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(target)
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert set(found) == {
        "token_embd.weight",
        "position_embd.weight",
        "token_embd_norm.bias",
        "blk.0.ffn_up.weight",
        "blk.0.layer_output_norm.weight",
    }
    stored = read_safetensors(folder / "model.safetensors")
    up = found["blk.0.ffn_up.weight"]
    assert up.data.dtype == np.float16
    assert np.array_equal(up.data, stored["encoder.layer.0.intermediate.dense.weight"])
    assert found["position_embd.weight"].data.dtype == np.float32
    tokens = reader.fields["tokenizer.ggml.tokens"]
    spelled = [bytes(tokens.parts[index]).decode() for index in tokens.data]
    assert spelled == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581cat", "s", "\u2581ü"]


def test_what_is_no_bert_is_refused_and_nothing_is_left(folder):
    (folder / "vocab.txt").write_text("one\n")
    with pytest.raises(ConfigError, match="engine.embedding_model"):
        convert(folder, folder / "out.gguf")
    assert not (folder / "out.gguf").exists()
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="engine.embedding_model"):
        convert(folder, folder / "out.gguf")


def test_a_file_that_is_there_is_used_as_it_is(tmp_path):
    (tmp_path / "all-minilm-l6-v2.gguf").write_bytes(b"x")
    assert converted(tmp_path).read_bytes() == b"x"
