"""Writes tiny models of the hybrid kind: Gated DeltaNet and full attention, with or without a head that guesses ahead;
and of attention only, to guess for others.

Their weights are random, but what they say isn't: each token has a successor, and the words behind one another go round
in circles of a given length. The blocks in between disturb that a little, so what is said depends on everything before
it, and wrong state shows.
"""

import struct
from functools import cache
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from numpy.typing import NDArray

WIDTH, INNER = 128, 128
HEAD_SIZE, HEADS, KV_HEADS = 32, 4, 2
STATE_SIZE, GROUPS, STATE_HEADS, KERNEL = 32, 2, 4, 4
KEYS, VALUES = STATE_SIZE * GROUPS, STATE_SIZE * STATE_HEADS

CERTAINTY = 0.11
"""Scale of the logits: the successor's probability is then about 0.9 at temperature 1, if nothing disturbs it."""

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

Floats = NDArray[np.float32]


@cache
def _metadata(path: str) -> dict[str, Any]:
    """A GGUF file's keys with their values, texts as bytes."""
    data, at = Path(path).read_bytes()[: 1 << 24], 8

    def read(kind: int) -> Any:
        nonlocal at
        if kind == _ARRAY:
            inner, count = read(4), read(10)
            return [read(inner) for _ in range(count)]
        if kind == _STRING:
            size = read(10)
            at += size
            return data[at - size : at]
        (value,) = struct.unpack_from("<" + _FORMATS[kind], data, at)
        at += struct.calcsize("<" + _FORMATS[kind])
        return value

    _, count = read(10), read(10)
    return {read(_STRING).decode(): read(read(4)) for _ in range(count)}


class Tiny:
    """One file. `circle`: how many words go round; `disturbance`: how much the blocks add to each word."""

    architecture = "qwen35"

    def __init__(
        self,
        path: Path,
        donor: str,
        *,
        layers: int = 4,
        head: Literal["none", "random", "good"] = "none",
        circle: int = 0,
        disturbance: float = 0.4,
        weights: str = "Q8_0",
        seed: int = 0,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._type = gguf.GGMLQuantizationType[weights]
        self._disturbance = disturbance
        self._layers, self._has_head = layers, head != "none"
        self._writer = gguf.GGUFWriter(str(path), self.architecture)
        num_tokens = self._describe(donor)
        self._words(num_tokens, circle)
        for layer in range(layers):
            self._block(layer, has_attention=(layer + 1) % 4 == 0)
        if self._has_head:
            self._head(layers, is_good=head == "good")
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()

    def _describe(self, donor: str) -> int:
        writer, layers = self._writer, self._layers + self._has_head
        words = _metadata(donor)
        writer.add_name("tiny hybrid")
        writer.add_context_length(8192)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(layers)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_key_length(HEAD_SIZE)
        writer.add_value_length(HEAD_SIZE)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(1e6)
        self._describe_kind()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(words["tokenizer.ggml.tokens"])
        writer.add_token_merges(words["tokenizer.ggml.merges"])
        writer.add_token_types(words["tokenizer.ggml.token_type"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)  # theirs
        writer.add_chat_template(words["tokenizer.chat_template"].decode())
        return len(words["tokenizer.ggml.tokens"])

    def _describe_kind(self) -> None:
        writer = self._writer
        writer.add_rope_dimension_count(HEAD_SIZE // 2)
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(VALUES)
        writer.add_ssm_state_size(STATE_SIZE)
        writer.add_ssm_time_step_rank(STATE_HEADS)
        writer.add_ssm_group_count(GROUPS)
        writer.add_uint32("qwen35.full_attention_interval", 4)
        if self._has_head:
            writer.add_uint32("qwen35.nextn_predict_layers", 1)

    def _words(self, num_tokens: int, circle: int) -> None:
        words = self._normal(num_tokens, WIDTH, 1.0)
        before = np.arange(num_tokens)  # whose successor each token is
        order = self._random.permutation(np.arange(100, num_tokens))
        size = circle or len(order)
        for start in range(0, len(order), size):
            ring = order[start : start + size]
            before[ring] = np.roll(ring, 1)
        self._matrix("token_embd.weight", words)
        self._matrix("output.weight", CERTAINTY * words[before])
        self._vector("output_norm.weight", np.ones(WIDTH))

    def _block(self, layer: int, *, has_attention: bool) -> None:
        name = f"blk.{layer}."
        self._vector(f"{name}attn_norm.weight", np.ones(WIDTH))
        self._vector(f"{name}post_attention_norm.weight", np.ones(WIDTH))
        if has_attention:
            self._attention(name)
        else:
            self._linear_attention(name)
        self._feed_forward(name)

    def _attention(self, name: str, *, is_gated: bool = True) -> None:
        self._matrix(f"{name}attn_q.weight", self._normal((1 + is_gated) * HEAD_SIZE * HEADS, WIDTH))
        self._matrix(f"{name}attn_k.weight", self._normal(HEAD_SIZE * KV_HEADS, WIDTH))
        self._matrix(f"{name}attn_v.weight", self._normal(HEAD_SIZE * KV_HEADS, WIDTH))
        self._matrix(f"{name}attn_output.weight", self._disturbance * self._normal(WIDTH, HEAD_SIZE * HEADS))
        self._vector(f"{name}attn_q_norm.weight", np.ones(HEAD_SIZE))
        self._vector(f"{name}attn_k_norm.weight", np.ones(HEAD_SIZE))

    def _linear_attention(self, name: str) -> None:
        inputs = 2 * KEYS + VALUES
        self._matrix(f"{name}attn_qkv.weight", self._normal(inputs, WIDTH))
        self._matrix(f"{name}attn_gate.weight", self._normal(VALUES, WIDTH))
        self._vector(f"{name}ssm_conv1d.weight", self._normal(inputs, KERNEL, 0.5))
        self._vector(f"{name}ssm_dt.bias", self._random.uniform(-4, -1, STATE_HEADS))
        self._vector(f"{name}ssm_a", -self._random.uniform(0.5, 4, STATE_HEADS))
        self._matrix(f"{name}ssm_beta.weight", self._normal(STATE_HEADS, WIDTH))
        self._matrix(f"{name}ssm_alpha.weight", self._normal(STATE_HEADS, WIDTH))
        self._vector(f"{name}ssm_norm.weight", np.ones(STATE_SIZE))
        self._matrix(f"{name}ssm_out.weight", self._disturbance * self._normal(WIDTH, VALUES))

    def _feed_forward(self, name: str) -> None:
        self._matrix(f"{name}ffn_gate.weight", self._normal(INNER, WIDTH))
        self._matrix(f"{name}ffn_up.weight", self._normal(INNER, WIDTH))
        self._matrix(f"{name}ffn_down.weight", self._disturbance * self._normal(WIDTH, INNER))

    def _head(self, layer: int, *, is_good: bool) -> None:
        """A good one lets the word through and knows its successor, as the model does; a random one knows nothing."""
        name = f"blk.{layer}."
        through = np.concatenate([np.eye(WIDTH), np.zeros((WIDTH, WIDTH))], axis=1)
        projection = through.astype(np.float32) if is_good else self._normal(WIDTH, 2 * WIDTH)
        self._matrix(f"{name}nextn.eh_proj.weight", projection)
        for norm in ("enorm", "hnorm", "shared_head_norm"):
            self._vector(f"{name}nextn.{norm}.weight", np.ones(WIDTH))
        self._block(layer, has_attention=True)

    def _normal(self, rows: int, columns: int, deviation: float | None = None) -> Floats:
        values = self._random.standard_normal((rows, columns), dtype=np.float32)
        return values * np.float32(columns**-0.5 if deviation is None else deviation)

    def _matrix(self, name: str, values: Floats) -> None:
        values = np.ascontiguousarray(values, dtype=np.float32)
        self._writer.add_tensor(name, gguf.quants.quantize(values, self._type), raw_dtype=self._type)

    def _vector(self, name: str, values: NDArray[np.floating]) -> None:
        self._writer.add_tensor(name, np.asarray(values, np.float32))


class TinyDense(Tiny):
    """Attention only. With another seed than a hybrid's it knows nothing of what that one says."""

    architecture = "qwen3"

    def _describe_kind(self) -> None:
        self._writer.add_rope_dimension_count(HEAD_SIZE)

    def _block(self, layer: int, *, has_attention: bool) -> None:
        name = f"blk.{layer}."
        self._vector(f"{name}attn_norm.weight", np.ones(WIDTH))
        self._vector(f"{name}ffn_norm.weight", np.ones(WIDTH))
        self._attention(name, is_gated=False)
        self._feed_forward(name)
