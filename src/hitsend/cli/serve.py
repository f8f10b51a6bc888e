"""`hitsend serve`: from flags to a running server.

Enters: flags. Leaves: when the server has stopped. Always true: nothing here knows how a server is built.
Next: `serve/supervisor.py`.
"""

from typing import Annotated

import typer

from hitsend.cli import options
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
        engine__model=model,
        engine__layout=layout,
        server__host=host,
        server__port=None if port is None else str(port),
        server__workers=None if workers is None else str(workers),
    )
    run(loaded)
