"""Writes small random LoRA adapters for a model, as GGUF files."""

from pathlib import Path

import gguf
import numpy as np

from hitsend.gguf import read_header

RANK = 4


def write_lora(path: Path, model_path: str, *, seed: int = 1, architecture: str = "llama") -> str:
    """Random A and B for the query and the down projections of every layer; returns the path.

    Their deviation of 0.1 changes what the bundled model says from its first words on.
    """
    found = read_header(model_path).metadata
    width, inner = found["llama.embedding_length"], found["llama.feed_forward_length"]
    generator = np.random.default_rng(seed)
    tensors = {}
    for layer in range(found["llama.block_count"]):
        for name, num_in in (("attn_q", width), ("ffn_down", inner)):
            for part, shape in (("a", (RANK, num_in)), ("b", (width, RANK))):
                values = generator.normal(0.0, 0.1, shape).astype(np.float32)
                tensors[f"blk.{layer}.{name}.weight.lora_{part}"] = values
    return write_adapter(path, tensors, architecture)


def write_adapter(path: Path, tensors: dict[str, np.ndarray], architecture: str = "llama") -> str:
    """A GGUF file of LoRA's kind with these tensors; returns the path."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
