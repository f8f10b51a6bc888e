"""`make clients`: every script for a client outside the default lock, against one server with the bundled model.

    python -m tests.clients.run_extra PYTHON

PYTHON is the interpreter with those clients. Prints one line per check and a total; exits 1 if anything failed.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.served import Served, serving

FOLDER = Path(__file__).parent
SCRIPTS = ("langchain_chat.py", "litellm_sdk.py", "llm_cli.py", "pydantic_agents.py")
EMBEDDING_MODEL = "all-minilm-l6-v2"
SETTINGS = (
    *("--set", "engine.num_slots=4", "--set", "engine.context=2048"),
    *("--set", f"engine.embedding_model={EMBEDDING_MODEL}"),
)
LIMIT_S = 900
Row = tuple[str, str, str]


def _rows(python: str, script: str, served: Served, model: str) -> list[Row]:
    """Client, check and result, from what the script prints; a script that breaks is one failed row."""
    command = [python, str(FOLDER / script), served.url, model, EMBEDDING_MODEL]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # its prices come from its own file
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return [(script, f"ended within {LIMIT_S} s", "FAIL")]
    client, rows = script, []
    for line in ran.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word == "client":
            client = rest
        elif word in ("ok", "FAIL"):
            rows.append((client, rest, word))
    if ran.returncode:
        print(ran.stderr[-3000:], file=sys.stderr)
        rows += [] if any(row[2] == "FAIL" for row in rows) else [(client, "the script runs to its end", "FAIL")]
    return rows


def main() -> None:
    """Run them one after the other."""
    python = sys.argv[1]
    with serving(*SETTINGS) as served:
        model = next(each["id"] for each in served.get("/v1/models")["data"] if each["id"] != EMBEDDING_MODEL)
        rows = [row for script in SCRIPTS for row in _rows(python, script, served, model)]
        state = served.wait_idle()
        left = {name: state[name] for name in ("running", "cells_used", "holds_open") if state[name]}
        rows.append(("hitsend", f"nothing is left behind {left or ''}".rstrip(), "FAIL" if left else "ok"))
    width = max(len(row[0]) for row in rows)
    for client, check, result in rows:
        print(f"{result:<5}{client:<{width + 2}}{check}")
    failed = sum(row[2] == "FAIL" for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
