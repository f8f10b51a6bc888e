"""`hitsend serve`: from flags to a running server.

Enters: flags. Leaves: when the server has stopped. Always true: nothing here knows how a server is built.
Next: `serve/supervisor.py`.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from hitsend.cli import options
from hitsend.core.errors import ConfigError
from hitsend.serve.supervisor import serve as run

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def serve(
    model: options.Model = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to bind; default 8000, 0 takes a free one.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Weights as-shipped, auto, or as a name from `hitsend models tune`.")
    ] = None,
    engine: Annotated[
        Literal["embedded", "vllm"], typer.Option(help="vllm: start `vllm serve` with the model, and stand before it.")
    ] = "embedded",
    vllm_port: Annotated[int, typer.Option(help="Where that vLLM listens, on this machine.")] = 8100,
    vllm_arguments: Annotated[
        str, typer.Option(help='What vLLM gets besides, as one string: "--max-model-len 8192".')
    ] = "",
    workers: Annotated[int | None, typer.Option(help="Gateway processes; default 1.")] = None,
    config: options.Config = None,
    data: options.Data = None,
    sets: options.Set = None,
) -> None:
    """Serve a model over HTTP until stopped: OpenAI's chat API, the inspector's page, metrics."""
    loaded = options.settings_from(
        config,
        sets,
        data=data,
        engine__model="none" if engine == "vllm" else model,
        engines=_vllm(model, vllm_port, vllm_arguments) if engine == "vllm" else None,
        engine__layout=layout,
        server__host=host,
        server__port=None if port is None else str(port),
        server__workers=None if workers is None else str(workers),
    )
    run(loaded)


def _vllm(model: str | None, port: int, arguments: str = "") -> str:
    """The one engine that there then is, in place of those in the settings file; what runs here is free."""
    if model is None:
        raise ConfigError("flag --engine vllm: which model? Give --model OWNER/REPO or a folder")
    alias = Path(model).name.lower()
    is_folder = Path(model).expanduser().exists()  # its path is no name that anybody should have to send
    one = {
        "kind": "vllm",
        "name": "vllm",
        "base_url": f"http://127.0.0.1:{port}",
        "models": {alias: alias if is_folder else model},
        "serve_model": model,
        "serve_arguments": _words(arguments),
        "prices": {"input": 0, "output": 0},
    }
    return json.dumps([one])


def _words(arguments: str) -> list[str]:
    """As a shell would take them apart."""
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise ConfigError(f"flag --vllm-arguments: {error}") from error
