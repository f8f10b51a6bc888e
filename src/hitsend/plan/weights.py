"""Weights files: what the tensors really take, read from their headers without reading the tensors.

Enters: a folder of safetensors with its config.json, or a GGUF file. Leaves: a `Checkpoint` with every tensor's name,
type and exact bytes. Always true: pure Python, no tensor is read; a header that is broken, a shard that the index names
and that isn't there, and an architecture nobody knows are refused by name. Next: `models.py`.
"""

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.gguf import TYPE_NAMES, GgufHeader, GgufTensor, read_header
from hitsend.plan.checkpoint import Checkpoint, KvLayer, Layer, Params, StateLayer, Tensor
from hitsend.plan.config import checkpoint_of
from hitsend.plan.patterns import MAX_LAYERS

MAX_HEADER_BYTES = 100 * 1024 * 1024
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_GGUF_KNOWN = frozenset(
    {
        *("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "phi3", "minimax-m2", "glm4moe"),
        *("qwen2", "qwen2vl", "qwen2moe", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"),
        *("qwen3next", "qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe"),
        *("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt-oss", "deepseek", "deepseek2", "llama4", "laguna"),
        *("falcon-h1", "jamba", "mamba", "mamba2", "lfm2", "lfm2moe", "afmoe", "mimo2", "bailingmoe", "bailingmoe2"),
        *("olmo", "olmo2", "olmoe", "starcoder2", "stablelm", "internlm2", "baichuan", "chatglm", "glm4", "exaone"),
        *("exaone4", "ernie4_5", "ernie4_5-moe", "seed_oss", "hunyuan-dense", "hunyuan-moe", "command-r", "cohere2"),
        *("phi2", "phimoe", "falcon", "gpt2", "gptneox", "bloom", "qwen", "minicpm", "nemotron", "apertus", "dots1"),
    }
)
_GGUF_SLIDING = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo2": 4,
    "afmoe": 4,
}
"""Every so-many-th layer reads everything: libllama's loaders have it, the files don't."""
_GGUF_CHUNK_TOKENS, _GGUF_CHUNK_EVERY = {"llama4": 8192}, 4
"""Chunked attention is a window to libllama."""
_GGUF_OWN_KV_LAYERS = {"gemma3n": 20}
"""Layers from the first on with keys and values of their own, where the file doesn't say."""
_GGUF_HYBRID = frozenset({"qwen3next", "qwen35", "qwen35moe"})


def safetensors_checkpoint(folder: Path) -> Checkpoint:
    """A folder with config.json and *.safetensors. Raises ConfigError that names the file."""
    config = read_json(folder / "config.json")
    found = checkpoint_of(config, str(folder / "config.json"), name=folder.name)
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = _named_in(index)
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise ConfigError(f"{index}: it names {missing[0]}, which isn't there ({len(missing)} missing)")
        shards = [shard for shard in shards if shard.name in named]
    # some makers ship the same weights twice, whole and in parts
    parts = [shard for shard in shards if not shard.name.startswith("consolidated")]
    tensors = tuple(tensor for shard in parts or shards for tensor in _safetensors_header(shard))
    return msgspec.structs.replace(found, tensors=tensors)


def _named_in(index: Path) -> set[str]:
    """Files that an index names. Raises ConfigError where it isn't a map from tensors to files."""
    told = read_json(index).get("weight_map")
    if not isinstance(told, dict) or not told or not all(isinstance(name, str) for name in told.values()):
        raise ConfigError(f"{index}: weight_map is {str(told)[:40]}, needed is an object of tensor names and files")
    return set(told.values())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ConfigError."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as failure:
        raise ConfigError(f"can't read {path}: {failure.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: it must be a JSON object")
    return value


def _safetensors_header(path: Path) -> list[Tensor]:
    """8 bytes of length, then JSON. Source: the format's own description in the safetensors repository's README."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is not a safetensors file: its header would take {length} of {size} bytes")
        try:
            header = msgspec.json.decode(file.read(length))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is not a safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file: its header is no object")
    return [
        _safetensor(path, name, entry, size - 8 - length) for name, entry in header.items() if name != "__metadata__"
    ]


def _safetensor(path: Path, name: str, entry: Any, data_bytes: int) -> Tensor:
    try:
        dtype, elements = entry["dtype"], math.prod(entry["shape"])
        start, end = entry["data_offsets"]
        bits = _BITS[dtype]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: tensor {name[:80]!r} is described wrongly: {error}") from None
    if not 0 <= start <= end <= data_bytes or (end - start) * 8 != elements * bits:
        raise ConfigError(f"{path}: tensor {name[:80]!r} takes bytes {start} to {end}, which its shape doesn't")
    return Tensor(name=name, dtype=dtype, elements=elements, num_bytes=end - start)


def gguf_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file's header. Raises ConfigError."""
    header = _gguf_header(path)
    header = msgspec.structs.replace(header, tensors=_of_all_parts(path, header))
    keys = _GgufKeys(header, str(path))
    if header.architecture not in _GGUF_KNOWN:
        raise ConfigError(
            f"{path}: the planner doesn't know the architecture {header.architecture!r} and won't guess; it knows "
            + ", ".join(sorted(_GGUF_KNOWN))
        )
    count, mtp = keys.number("block_count"), keys.maybe("nextn_predict_layers")
    if not mtp < count <= MAX_LAYERS:
        raise ConfigError(
            f"{path}: {header.architecture}.block_count is {count}, needed is more than the {mtp} of "
            f"nextn_predict_layers and at most {MAX_LAYERS:,}"
        )
    has_latent_tensors = any("attn_k_b" in tensor.name for tensor in header.tensors)
    layers = tuple(_gguf_layer(keys, index, count - mtp) for index in range(count))
    by_layer = _gguf_params(header.tensors, keys)
    top = by_layer.pop(None, Params())
    layers = tuple(
        msgspec.structs.replace(layer, params=by_layer.get(index, Params())) for index, layer in enumerate(layers)
    )
    return Checkpoint(
        name=str(header.metadata.get("general.name") or path.stem),
        architecture=header.architecture,
        source=str(path),
        layers=layers[: count - mtp],
        mtp_layers=layers[count - mtp :],
        hidden=keys.positive("embedding_length"),
        vocab=header.array_lengths.get("tokenizer.ggml.tokens") or keys.maybe("vocab_size") or None,
        context=keys.maybe("context_length") or None,
        top=top,
        intermediate=keys.maybe("feed_forward_length") or None,
        experts_per_token=keys.maybe("expert_used_count"),
        expert_width=keys.maybe("expert_feed_forward_length"),
        weights="gguf",
        tensors=tuple(
            Tensor(found.name, TYPE_NAMES.get(found.kind, f"type {found.kind}"), found.elements, found.num_bytes)
            for found in header.tensors
        ),
        is_uncompressed_mla=header.architecture == "deepseek2" and not has_latent_tensors,
    )


def _of_all_parts(path: Path, header: GgufHeader) -> tuple[GgufTensor, ...]:
    """A model in several files keeps its metadata in the first. Raises ConfigError for a missing or later part."""
    count = header.metadata.get("split.count") or 1
    if count == 1:
        return header.tensors
    mark = f"-00001-of-{count:05}"
    if not path.stem.endswith(mark):
        raise ConfigError(f"{path}: it is one of {count} parts; give the first, whose name ends in {mark}.gguf")
    stem = path.stem.removesuffix(mark)
    parts = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(2, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(f"{path}: part {missing[0]} isn't there ({len(missing)} missing)")
    return (*header.tensors, *(tensor for part in parts for tensor in _gguf_header(part).tensors))


def _gguf_header(path: Path) -> GgufHeader:
    try:
        return read_header(str(path))
    except ConfigError as error:
        raise ConfigError(str(error).removeprefix("engine.model: ")) from None


class _GgufKeys:
    """Numbers of `architecture.name`, one for all layers or one per layer."""

    def __init__(self, header: GgufHeader, source: str) -> None:
        self.header = header
        self.source = source

    def find(self, name: str, layer: int | None = None) -> Any:
        value = self.header.metadata.get(f"{self.header.architecture}.{name}")
        if isinstance(value, tuple):
            if layer is None:
                return max(value, default=None)
            return value[layer] if layer < len(value) else None
        return value

    def number(self, name: str, layer: int | None = None) -> int:
        value = self.find(name, layer)
        if value is None:
            raise ConfigError(f"{self.source}: the key {self.header.architecture}.{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
            raise ConfigError(f"{self.source}: {self.header.architecture}.{name} is {value!r}, no usable number")
        return value

    def positive(self, name: str, layer: int | None = None) -> int:
        value = self.number(name, layer)
        if not value:
            raise ConfigError(f"{self.source}: {self.header.architecture}.{name} is 0, needed is 1 or more")
        return value

    def maybe(self, name: str, layer: int | None = None) -> int:
        return 0 if self.find(name, layer) is None else self.number(name, layer)


def _gguf_layer(keys: _GgufKeys, index: int, own_layers: int) -> Layer:
    is_attention, is_recurrent = _gguf_kind(keys, index, own_layers)
    kv = _gguf_kv(keys, index) if is_attention else None
    state = None
    architecture = keys.header.architecture
    if is_recurrent and architecture.startswith("lfm2"):
        state = StateLayer("short_conv", keys.positive("shortconv.l_cache"), 0, 0, keys.positive("embedding_length"), 1)
    elif is_recurrent and architecture in {"mamba", "jamba"}:
        kernel, size = keys.positive("ssm.conv_kernel"), keys.positive("ssm.state_size")
        state = StateLayer("mamba1", kernel, 0, size, keys.positive("ssm.inner_size"), 1, dtype="float32")
    elif is_recurrent:
        rank, inner = keys.positive("ssm.time_step_rank"), keys.positive("ssm.inner_size")
        state = StateLayer(
            kind="gdn" if architecture in _GGUF_HYBRID else "mamba2",
            kernel=keys.positive("ssm.conv_kernel"),
            groups=keys.number("ssm.group_count"),
            key_dim=keys.positive("ssm.state_size"),
            value_heads=rank,
            value_dim=inner // max(1, rank),
            dtype="float32",
        )
    shared = keys.maybe("attention.shared_kv_layers") or max(
        0, own_layers - _GGUF_OWN_KV_LAYERS.get(architecture, own_layers)
    )
    if shared and shared >= own_layers:
        raise ConfigError(f"{keys.source}: attention.shared_kv_layers is {shared}, needed is fewer than {own_layers}")
    return Layer(kv=kv, state=state, shares_kv=index >= own_layers - shared and index < own_layers)


def _gguf_kind(keys: _GgufKeys, index: int, own_layers: int) -> tuple[bool, bool]:
    """Whether the layer is attention, and whether it is recurrent; a speculation layer behind the others is
    attention."""
    if index >= own_layers:
        return True, False
    architecture = keys.header.architecture
    if architecture in {"mamba", "mamba2"}:
        return False, True
    if architecture == "falcon-h1":
        return True, True
    if architecture in _GGUF_HYBRID:
        every = keys.maybe("full_attention_interval") or 4
        is_full = (index + 1) % every == 0
        return is_full, not is_full
    has_kv = keys.maybe("attention.head_count_kv", index) > 0 or keys.find("attention.head_count_kv") is None
    has_state = bool(keys.maybe("ssm.inner_size")) and not has_kv and keys.maybe("feed_forward_length", index) == 0
    if architecture in {"granitehybrid", "jamba", "lfm2", "lfm2moe"}:
        has_state = not has_kv
    return has_kv, has_state


def _gguf_kv(keys: _GgufKeys, index: int) -> KvLayer:
    heads = keys.positive("attention.head_count", index)
    size = keys.positive("embedding_length") // heads
    rank = keys.maybe("attention.kv_lora_rank")
    if rank:
        key = keys.maybe("attention.key_length_mla") or keys.number("attention.key_length")
        value = keys.maybe("attention.value_length_mla") or keys.number("attention.value_length")
        rope = keys.number("rope.dimension_count")
        return KvLayer(kv_heads=1, heads=heads, key_dim=key, value_dim=value, latent_dim=rank, rope_dim=rope)
    window = keys.maybe("attention.sliding_window") if _gguf_slides(keys, index) else 0
    if (index + 1) % _GGUF_CHUNK_EVERY:
        window = window or _GGUF_CHUNK_TOKENS.get(keys.header.architecture, 0)
    suffix = "_swa" if window and keys.maybe("attention.key_length_swa") else ""
    kv_heads = keys.maybe("attention.head_count_kv", index) or heads
    if heads % kv_heads:
        raise ConfigError(f"{keys.source}: attention.head_count_kv is {kv_heads}, which doesn't divide {heads} heads")
    return KvLayer(
        kv_heads=kv_heads,
        heads=heads,
        key_dim=keys.maybe(f"attention.key_length{suffix}") or size,
        value_dim=keys.maybe(f"attention.value_length{suffix}") or size,
        window_tokens=window or None,
    )


def _gguf_slides(keys: _GgufKeys, index: int) -> bool:
    pattern = keys.header.metadata.get(f"{keys.header.architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return bool(pattern[index]) if index < len(pattern) else False
    every = pattern if isinstance(pattern, int) and pattern else _GGUF_SLIDING.get(keys.header.architecture, 0)
    return bool(every) and (index + 1) % every != 0


_COMPONENTS = (
    # what a tensor's name holds → where it is counted; the first that matches
    ("_norm", "norms"),
    ("nextn.", "other"),
    ("_exps", "routed_experts"),
    ("_shexp", "shared_experts"),
    ("ffn_gate_inp", "router"),
    ("exp_probs_b", "router"),
    ("ffn_", "mlp"),
    ("ssm_", "recurrent"),
    ("attn_gate", "recurrent"),
    ("attn_", "attention"),
    ("token_embd", "embedding"),
    ("output.", "head"),
)


def _gguf_params(tensors: Sequence[GgufTensor], keys: _GgufKeys) -> dict[int | None, Params]:
    """By layer; None: what belongs to no layer."""
    experts, used = keys.maybe("expert_count"), keys.maybe("expert_used_count")
    if used > experts:
        raise ConfigError(f"{keys.source}: expert_used_count is {used}, there are {experts} experts")
    found: dict[int | None, Params] = {}
    for tensor in tensors:
        prefix, _, rest = tensor.name.partition(".")
        number = rest.partition(".")[0]
        layer = int(number) if prefix == "blk" and number.isdecimal() else None
        field = next((field for part, field in _COMPONENTS if part in tensor.name), "other")
        params = Params(**{field: tensor.elements})
        if field == "routed_experts" and experts:
            params += Params(active_experts=tensor.elements * used // experts)
        found[layer] = found.get(layer, Params()) + params
    return found
