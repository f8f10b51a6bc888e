"""Writes small random LoRA adapters for a model, as GGUF files."""

from pathlib import Path

import gguf
import numpy as np

RANK = 4


def write_lora(path: Path, model_path: str, *, seed: int = 1, size: float = 0.1, architecture: str = "llama") -> str:
    """Random A and B for the query and the down projections of every layer; returns the path.

    `size` is the deviation of their values: 0.1 changes what the bundled model says from its first words on.
    """
    reader = gguf.GGUFReader(model_path)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    generator = np.random.default_rng(seed)
    for tensor in reader.tensors:
        if tensor.name.endswith(("attn_q.weight", "ffn_down.weight")):
            num_in, num_out = (int(length) for length in tensor.shape)
            for name, shape in (("a", (RANK, num_in)), ("b", (num_out, RANK))):
                values = generator.normal(0.0, size, shape).astype(np.float32)
                writer.add_tensor(f"{tensor.name}.lora_{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
