"""The frame of the scripts for clients too heavy for the default lock: `python SCRIPT.py URL MODEL EMBEDDING_MODEL`.

Each check is a function that takes the target; its docstring is its line in the table. All run, whatever fails before.
"""

import sys
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import NamedTuple


class Target(NamedTuple):
    """A running server, and the two models to ask for."""

    url: str
    model: str
    embedding: str

    @property
    def base(self) -> str:
        """What the clients call base URL."""
        return f"{self.url}/v1"


def main(package: str, *checks: Callable[[Target], None]) -> None:
    """Print `client NAME VERSION`, then `ok` or `FAIL` and the check's docstring; exits 1 if any failed."""
    target = Target(*sys.argv[1:4])
    print(f"client {package} {version(package)}")
    failed = 0
    for check in checks:
        try:
            check(target)
        except Exception as error:  # noqa: BLE001 (any error of a client is this check's result)
            failed += 1
            traceback.print_exc()
            first = (str(error).splitlines() or [""])[0]
            print(f"FAIL {check.__doc__} ({type(error).__name__}: {first[:200]})", flush=True)
        else:
            print(f"ok {check.__doc__}", flush=True)
    sys.exit(failed > 0)
