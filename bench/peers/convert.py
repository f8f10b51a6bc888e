"""The bundled GGUF as a folder that transformers, vLLM and optimum read, weights dequantised to float32.

Usage (with the Python that has transformers and gguf): python convert.py GGUF FOLDER [--thinks]
`--thinks` gives two reserved tokens that the model never learned the names <think> and </think>, and has the template
open a thought where `enable_thinking` is true: for tests of reasoning parsers. The weights stay the same.
"""

import importlib
import json
import pathlib
import sys
from typing import Any

torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")

RENAMED = {"<issue_start>": "<think>", "<issue_comment>": "</think>"}


def convert(gguf: pathlib.Path, folder: pathlib.Path) -> None:
    """Weights, configuration, tokenizer and template."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def rename(folder: pathlib.Path) -> None:
    """The two tokens, in every file that spells them."""
    for file in folder.glob("*.json"):
        if file.stat().st_size > 50_000_000:
            continue
        text = file.read_text("utf-8")
        for old, new in RENAMED.items():
            text = text.replace(json.dumps(old), json.dumps(new))
        file.write_text(text, "utf-8")
    tokenizer = folder / "tokenizer.json"
    tree = json.loads(tokenizer.read_text("utf-8"))
    for token in tree["added_tokens"]:
        if token["content"] in RENAMED.values():
            token["special"] = False  # special ones are left out of the text that parsers see
    tokenizer.write_text(json.dumps(tree, ensure_ascii=False), "utf-8")
    template = folder / "chat_template.jinja"
    text = template.read_text("utf-8")
    opens = "{{ '<|im_start|>assistant\n' }}"
    assert opens in text, "the template opens the answer otherwise"
    template.write_text(text.replace(opens, opens + "{% if enable_thinking %}{{ '<think>\n' }}{% endif %}"), "utf-8")


def main() -> None:
    """Command line."""
    gguf, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    convert(gguf, folder)
    if "--thinks" in sys.argv:
        rename(folder)


if __name__ == "__main__":
    main()
