"""A BERT encoder in numpy, written from the paper, as a second opinion on libllama's vectors."""

import math
from pathlib import Path

import numpy as np

from hitsend.serve.engine.convert_minilm import read_safetensors

_erf = np.vectorize(math.erf)


class Bert:
    def __init__(self, folder: Path, num_layers: int = 6, num_heads: int = 12) -> None:
        self.tensors = {
            name: values.astype(np.float64) for name, values in read_safetensors(folder / "model.safetensors").items()
        }
        self.num_layers, self.num_heads = num_layers, num_heads

    def embed(self, token_ids) -> np.ndarray:
        """The mean over all tokens of the last layer, of length 1."""
        ids = np.asarray(token_ids)
        at = "embeddings."
        x = self.tensors[at + "word_embeddings.weight"][ids]
        x = (
            x
            + self.tensors[at + "position_embeddings.weight"][: len(ids)]
            + self.tensors[at + "token_type_embeddings.weight"][0]
        )
        x = self._norm(x, at + "LayerNorm")
        for layer in range(self.num_layers):
            at = f"encoder.layer.{layer}."
            x = self._norm(
                x + self._linear(self._attend(x, at), at + "attention.output.dense"), at + "attention.output.LayerNorm"
            )
            wide = self._linear(x, at + "intermediate.dense")
            wide = wide * 0.5 * (1 + _erf(wide / math.sqrt(2)))
            x = self._norm(x + self._linear(wide, at + "output.dense"), at + "output.LayerNorm")
        mean = x.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def _attend(self, x, at):
        parts = [self._linear(x, f"{at}attention.self.{name}") for name in ("query", "key", "value")]
        q, k, v = (part.reshape(len(x), self.num_heads, -1).swapaxes(0, 1) for part in parts)
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return (weights @ v).swapaxes(0, 1).reshape(x.shape)

    def _linear(self, x, name):
        return x @ self.tensors[name + ".weight"].T + self.tensors[name + ".bias"]

    def _norm(self, x, name):
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * self.tensors[name + ".weight"] + self.tensors[name + ".bias"]
