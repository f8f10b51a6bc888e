"""The settings of what computes: models, engines, adapters; and what all sections are made of.

Enters: nothing. Leaves: section types. Always true: as in `settings.py`, which puts them into the tree and is where
everybody imports them from. Next: `settings.py`.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Layout = Literal["as-shipped", "auto", "bf16", "q8_0", "q4_0", "iq4_nl", "q4_k", "q4_0+offsets"]
Snapshots = Annotated[int, Meta(ge=0, le=7)]
Speculation = Literal["auto", "off", "prompt_lookup", "draft", "mtp"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused."""


class SamplingPreset(Section, frozen=True):
    """Sampling defaults; None leaves the checkpoint's own value."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None


class ModelSettings(Section, frozen=True):
    """`[[models]]`: what a model whose name or architecture contains `match` (case-insensitive) gets as defaults."""

    match: str
    thinking: SamplingPreset = SamplingPreset()
    non_thinking: SamplingPreset = SamplingPreset()
    thinking_by_default: bool = False
    tool_format: Literal["hermes", "xml", "llama3", "mistral", "pythonic", "none"] | None = None
    """How it writes calls; without it, what its template tells. `none`: calls stay text."""
    reasoning_format: Literal["think", "brackets", "seed", "none"] | None = None
    """How it marks thoughts; without it, what its template tells. `none`: thoughts stay text."""


class EngineSettings(Section, frozen=True):
    """The embedded engine."""

    model: str = "smollm2-135m"
    """A GGUF path, a name from the models folder, `smollm2-135m` (bundled), hf:owner/repo[:file], or `none`."""
    models_dir: str | None = None
    """Folder of GGUF files; default DATA_DIR/models."""
    libllama: str | None = None
    """Path of a libllama shared library; default is the one in the xllamacpp package."""
    blas: str | None = None
    """Path of a ggml backend for that library, BLAS or ZenDNN: computes products where weights of their type gain."""
    embedding_model: str | None = None
    """What `/v1/embeddings` runs: a GGUF path or name, `all-minilm-l6-v2`, or hf:owner/repo[:file]; none by default."""
    embedding_context: Count = 0
    """Tokens per text to embed; 0: what the model was trained on, at most 8192."""
    alias: str | None = None
    """The name under which the model is served; default is its file's stem."""
    num_threads: Count = 0
    """0: as many as cores."""
    num_threads_alone: Count = 0
    """Of a step of one token. 0: as many as `num_threads`, or one where `layout = auto` measured that it is faster."""
    layout: Layout = "as-shipped"
    """How weights are stored in memory. auto: converted once if this machine gains by it within `layout_max_loss`."""
    layout_max_loss: Share = 0.01
    """Perplexity that `auto` may lose against the weights as shipped, as a share."""
    kv_type: Literal["f16", "q8_0"] = "f16"
    """How keys and values are stored; q8_0 takes 53 % of the memory."""
    num_slots: Annotated[int, Meta(ge=1, le=256)] = 32
    """Sequences that can run at once."""
    context: Count = 0
    """Tokens per sequence; 0: as many as the KV budget allows, at most what the model was trained on."""
    kv_budget_bytes: Count = 2 * 1024 * 1024 * 1024
    """Memory for the KV cache; 0: as much as `num_slots` times `context` takes."""
    memory_budget_bytes: Positive | None = None
    """Of all embedded models but `embedding_model`, as predicted; saved prefixes come on top. Default: no bound."""
    kv_mode: Literal["auto", "per_stream", "unified"] = "auto"
    """per_stream: each sequence its own cells (faster); unified: one pool; auto: unified where `context` needs it."""
    step_tokens: Positive = 512
    """Token budget of one step: decodes first, then prefill chunks."""
    speculation: Speculation = "auto"
    """Guessing ahead, answers unchanged: from a text itself, by `draft_model`, by an MTP head; auto: what can work."""
    draft_model: str | None = None
    """A smaller model of the same vocabulary, named like `model`; its KV cache comes on top of `kv_budget_bytes`."""
    snapshots: Snapshots | None = None
    """States that hybrid models keep beside each sequence's, at most 7, to take guesses back; unset: what is cheap."""
    tpot_target_s: Seconds = 0.1
    """Prompts are computed in chunks that keep the mean time per output token of others under this, where they can."""
    ttft_target_s: Seconds = 2.0
    """A prompt that can be on time and has waited for half of this goes first; of over 3072 tokens, none."""
    reserve_tokens: Count = 64
    """Cells beyond its prompt that a request must find free to be admitted."""
    prefix_cache_bytes: Count = 512 * 1024 * 1024
    """Host memory for prefixes of earlier prompts whose cells somebody else needed; 0: no prefix is ever used again."""
    prefix_cache_dir: str | None = None
    """A folder to which saved prefixes go that have to leave memory; default: none. What is there holds prompts."""
    prefix_cache_disk_bytes: Count = 0
    """Most that a model's saved prefixes take in `prefix_cache_dir`; 0: nothing is written."""
    prefix_cache_step: Positive = 64
    """Prompts go on at multiples of this. 64 keeps outputs bit-identical to those of a fresh run; 1: at any token."""
    prefix_cache_answers: bool = True
    """Use answers again as they were decoded; false: compute them anew, as prompt, for bit-identical outputs."""
    prefix_cache_scope: Literal["org", "app", "user", "key"] = "key"
    """Who shares a prefix cache: all keys of an organisation, an application or a user, or each key for itself."""
    max_waiting: Positive = 256
    """Requests in the waiting queue; one more, or one of whoever has the most there, is `server_overloaded`."""
    aging_s: Seconds = 10.0
    """A tenant that waits and gets nothing goes up one tier each time so many seconds pass."""
    wait_timeout_s: Seconds = 60.0
    """A request that waited so long is refused with `server_overloaded`."""
    start_timeout_s: Seconds = 120.0
    """For the model to be loaded."""
    progress_timeout_s: Seconds = 8.0
    """/healthz turns red after this many seconds without progress."""
    check_every_step: bool = False
    """Prove after every step that no cell was lost (always done when idle)."""


class AdapterSettings(Section, frozen=True):
    """`[[adapters]]`: a LoRA adapter (GGUF) over an embedded model, served as a model of its own."""

    name: str
    """The name under which it is served."""
    path: str
    """Its GGUF file, as llama.cpp's `convert_lora_to_gguf` makes it of `adapter_model.safetensors`."""
    model: str | None = None
    """The embedded model that it changes, by the name under which that is served; default: `engine.model`."""
    scale: Annotated[float, Meta(ge=-100, le=100)] = 1.0
    """How much of the change; 0: none."""


class PooledSettings(Section, frozen=True, tag_field="kind", tag="embedded"):
    """`[[engines]]` with `kind = "embedded"`: one more model of this machine, loaded when it is asked for.

    What isn't set is as in `[engine]`, whose model is always loaded; only `draft_model`, `snapshots`, and
    `speculation` by a draft model or an MTP head, are each model's own. Not together with `server.workers` above 1.
    """

    name: str
    """How records, rows and metrics call it."""
    model: str
    """As `engine.model`."""
    aliases: tuple[str, ...] = ()
    """The names under which it is served; default is its file's stem."""
    num_slots: Annotated[int, Meta(ge=1, le=256)] | None = None
    context: Count | None = None
    kv_budget_bytes: Count | None = None
    num_threads: Count | None = None
    layout: Layout | None = None
    """As `engine.layout`; auto: measured for this model."""
    speculation: Speculation | None = None
    """As `engine.speculation`; unset: as there, but auto where that is draft or mtp."""
    draft_model: str | None = None
    """As `engine.draft_model`, for this model."""
    snapshots: Snapshots | None = None
    """As `engine.snapshots`, for this model."""
    max_waiting: Positive | None = None
    max_concurrent: Positive = 256
    """Requests that run or wait there at once; one more is refused with `server_overloaded`."""
    idle_unload_s: Annotated[float, Meta(ge=0)] = 300.0
    """After so long without a request it is unloaded. 0: only when another model needs its room."""
    is_loaded_at_start: bool = False
