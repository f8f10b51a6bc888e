"""The command line: one module per command.

Enters: arguments. Leaves: an exit status; answers and `--json` documents on stdout, everything for the eye on stderr.
Always true: a command's module is imported only when that command runs, so that `hitsend --help` and the client
commands don't wait for the server's libraries; settings come from `settings.load_process` only; no command reaches into
a stage. Order of reading: `serve.py`, `send.py`, `waterfall.py`, `chat.py`, `load.py`, `inspect.py`, `replay.py`,
`diagnose.py`, `config.py`, `keys.py`, `orgs.py`, `usage.py`, `reconcile.py`, `routes.py`, `plan.py`, `engines.py`.
"""

import errno
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

import hitsend
from hitsend.core.errors import ConfigError

COMMANDS = {
    "serve": "Serve a model over HTTP until stopped.",
    "send": "Ask one question; show the answer and where its time went.",
    "chat": "Talk with the model in this terminal.",
    "load": "Load any OpenAI-compatible server and measure it.",
    "inspect": "Show one request's flight record, or list the recent ones.",
    "replay": "Run a recorded request again; show where it differs.",
    "diagnose": "Say what the bottleneck is, from a server's metrics.",
    "keys": "Create, list, change, rotate and revoke API keys.",
    "orgs": "Organisations: what is granted to them.",
    "apps": "Applications: what is granted to them.",
    "users": "Users: what is granted to them.",
    "limits": "What holds for everybody.",
    "usage": "Add up the ledger.",
    "reconcile": "Prove that ledger, counters and records agree.",
    "routes": "What routes choose, and why.",
    "models": "Models on this machine: list them, measure layouts.",
    "plan": "Plan memory, money and tokens.",
    "engines": "List the engines; check those elsewhere.",
    "config": "Show every setting and where its value came from.",
}
"""Every command, in the order of `--help`. Each lives in the module of its name and is that module's `app`."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class CallFailed(Exception):
    """The server refused, broke off or isn't there: one line for a person, no traceback."""


class _Lazy(TyperGroup):
    """Knows every command's one-line help, and imports only the one that runs.

    `Any` stands where typer's private copy of click has its types.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # the base's signature
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002  # the base's signature
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name in COMMANDS:
            module = importlib.import_module(f"hitsend.cli.{name}")
            command = typer.main.get_command(module.app)
            command.name = name
        return name, command, rest


app = typer.Typer(
    cls=_Lazy, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"hitsend {hitsend.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """What happens when you hit send: serve, ask, inspect, bill."""


def main() -> None:
    """The `hitsend` command. What a person can put right is said in one line, without a traceback."""
    _open_standard()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a bar that an old encoding lacks is no reason to lose the figures
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            _flush()
    except (ConfigError, CallFailed) as error:
        print(f"hitsend: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        sys.stdout = _nowhere()  # what is left in the other one can't go out
        print(f"hitsend: {error.filename or 'what was to be written'}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _flush() -> None:
    """Now, and not at the interpreter's end, which has nothing but tracebacks for it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # who read it has enough
        sys.stdout = _nowhere()
        sys.exit(1)


def _open_standard() -> None:
    """Where the caller closed stdin, stdout or stderr, a file or socket of ours would take its number, and what is
    meant for the eye would go there; libuv ends a process over it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    sys.stdout = sys.stdout or _nowhere()
    sys.stderr = sys.stderr or _nowhere()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
