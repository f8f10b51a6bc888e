"""The `llm` command and its Python API, with extra-openai-models.yaml: python llm_cli.py URL MODEL EMBEDDING_MODEL."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
from scripted import Target, main

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "cloudy", "rain"]}, "windy": {"type": "boolean"}},
    "required": ["sky", "windy"],
    "additionalProperties": False,
}
QUESTION = "What is the capital of France?"


def _configure(target: Target, folder: Path) -> None:
    """Three models of one endpoint in llm's own folder; JSON is YAML."""
    os.environ["LLM_USER_PATH"] = str(folder)
    common = {"model_name": target.model, "api_base": target.base, "supports_schema": True, "supports_tools": True}
    models = [
        {"model_id": "hitsend"} | common,
        {"model_id": "hitsend-responses", "responses": True} | common,
        {"model_id": "hitsend-completion", "completion": True, "model_name": target.model, "api_base": target.base},
    ]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(models))


def _run(*words: str) -> str:
    command = [sys.executable, "-m", "llm", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr[-500:]
    return ran.stdout


def prompt(target: Target) -> None:
    """command: streamed, --no-stream and --async give the same text; usage is logged"""
    common = ("-m", "hitsend", "-o", "max_tokens", "30", "-o", "temperature", "0", QUESTION)
    whole = _run(*common, "--no-stream")
    assert whole.strip()
    assert _run(*common) == whole == _run(*common, "--async")
    logged = json.loads(_run("logs", "-n", "1", "--json"))[0]
    assert logged["response"].strip() == whole.strip()
    assert logged["input_tokens"] > 0
    assert logged["output_tokens"] > 0


def conversation(target: Target) -> None:
    """command: -s system prompt, -c goes on with the conversation"""
    options = ("-o", "max_tokens", "12", "-o", "temperature", "0")
    assert _run("-m", "hitsend", *options, "-s", "Be brief.", QUESTION).strip()
    assert _run("-c", *options, "And of Peru?").strip()


def schema(target: Target) -> None:
    """command: --schema, whole and streamed"""
    for model in ("hitsend", "hitsend-responses"):
        for more in ((), ("--no-stream",)):
            found = json.loads(_run("-m", model, "--schema", json.dumps(SCHEMA), "The weather?", *more))
            assert found["sky"] in ("clear", "cloudy", "rain")


def responses(target: Target) -> None:
    """command: responses: true in the YAML, streamed and whole"""
    common = ("-m", "hitsend-responses", "-o", "max_tokens", "30", "-o", "temperature", "0", QUESTION)
    whole = _run(*common, "--no-stream")
    assert whole.strip()
    assert _run(*common) == whole


def completion(target: Target) -> None:
    """command: completion: true in the YAML"""
    assert _run("-m", "hitsend-completion", "-o", "max_tokens", "8", "One, two, three,").strip()


def tools(target: Target) -> None:
    """command: tools are described and the answer comes (this model calls none by itself)"""
    code = "def multiply(x: int, y: int) -> int:\n    '''Multiply.'''\n    return x * y\n"
    assert _run("-m", "hitsend", "--functions", code, "-o", "max_tokens", "20", "-o", "temperature", "0", QUESTION)


def python(target: Target) -> None:
    """Python API: prompt, iteration, usage"""
    model = llm.get_model("hitsend")
    answer = model.prompt(QUESTION, max_tokens=20, temperature=0)
    pieces = list(answer)
    assert len(pieces) > 2
    assert "".join(pieces) == answer.text() == model.prompt(QUESTION, max_tokens=20, temperature=0, stream=False).text()
    assert answer.usage().output > 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hitsend-llm-") as own:
        _configure(Target(*sys.argv[1:4]), Path(own))
        main("llm", prompt, conversation, schema, responses, completion, tools, python)
