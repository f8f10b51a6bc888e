"""LoRA adapters on real weights: what they change, and that they never get mixed up."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.core.request import SamplingParams
from hitsend.serve.engine.embedded import EmbeddedEngine
from hitsend.serve.engine.protocol import Job, Tokens
from hitsend.serve.engine.sizing import size, sizes
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.settings import AdapterSettings
from tests.engine.conftest import SMALL
from tests.engine.lora import write_adapter, write_lora

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from tests.engine.conftest import bundled

    folder = tmp_path_factory.mktemp("adapters")
    red, blue = (write_lora(folder / f"{name}.gguf", bundled(), seed=seed) for seed, name in enumerate(("red", "blue")))
    return (
        AdapterSettings("red", red),
        AdapterSettings("blue", blue),
        AdapterSettings("nothing", red, scale=0.0),
    )


@pytest.fixture
async def engine(model_path, files):
    made = EmbeddedEngine(SMALL, model_path, SystemClock(), model="m", pause_tokens=1000, adapters=files)
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


async def answer(engine, number, adapter, *, max_tokens=5, temperature=0.7):
    prompt = tuple(np.random.default_rng(number % 4).integers(100, 40_000, 4 + 5 * (number % 4)).tolist())
    sampling = SamplingParams(temperature=temperature, seed=number, ignore_eos=True)
    job = Job(f"r{number}-{adapter}", prompt, sampling, 1, max_tokens, 100.0, adapter=adapter)
    generation = engine.generate(job)
    try:
        return [token.token_id async for event in generation if isinstance(event, Tokens) for token in event.sampled]
    finally:
        await generation.aclose()


async def test_interleaved_requests_get_the_tokens_they_get_alone(engine):
    assert engine.facts.adapters == ("blue", "nothing", "red")
    names = (None, "red", "blue")
    asked = [(number, name) for number in range(3) for name in names]
    alone = [await answer(engine, number, name) for number, name in asked]
    together = await asyncio.gather(*(answer(engine, number, name) for number, name in asked))
    assert together == alone
    for number in range(3):
        own = [tuple(tokens) for (each, _), tokens in zip(asked, alone, strict=True) if each == number]
        assert len(set(own)) == 3, "each adapter says something else"
    assert await answer(engine, 1, "nothing") == alone[asked.index((1, None))], "scale 0 is the model as it is"


async def test_32_mixed_requests_all_finish(engine):
    names = (None, "red", "blue", "nothing")
    answers = await asyncio.gather(*(answer(engine, i, names[i % 4], max_tokens=2 + i % 3) for i in range(32)))
    assert [len(tokens) for tokens in answers] == [2 + i % 3 for i in range(32)]
    state = engine.state()
    assert (state.running, state.waiting, state.cells_used, state.check) == (0, 0, 0, None)


async def test_what_is_predicted_is_what_is_loaded(engine, model_path, files):
    (sized,) = await sizes([WorkerConfig("m", model_path, SMALL, files)])
    only_when_loaded = {"metadata", "cache_secret", "speculation", "speculation_reason", "words"}
    fields = [name for name in engine.facts.__struct_fields__ if name not in only_when_loaded]
    found = {name: getattr(engine.facts, name) for name in fields}
    predicted = {name: getattr(sized.facts, name) for name in found}
    weights = predicted.pop("weights_bytes"), found.pop("weights_bytes")
    assert predicted == found
    assert weights[0] == pytest.approx(weights[1], rel=0.001)
    assert sized.memory.adapters == pytest.approx(sum(Path(file.path).stat().st_size for file in files), rel=0.02)
    assert sized.num_bytes > sized.memory.adapters + sized.memory.weights > weights[1]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda folder, model: model, r"adapters\[x\]\.path.*is it a model"),
        (lambda folder, model: str(folder / "none.gguf"), r"adapters\[x\]\.path: can't read"),
        (lambda folder, model: write_lora(folder / "q.gguf", model, architecture="qwen2"), "'qwen2', the model is 'll"),
        (lambda folder, model: _cut(write_lora(folder / "c.gguf", model)), r"adapters\[x\]\.path.*the file at byte"),
        (lambda folder, model: _odd(folder / "o.gguf"), "1 tensors, expected pairs"),
    ],
)
def test_a_file_that_is_no_adapter_for_this_model_is_refused(tmp_path, model_path, make, complaint):
    file = AdapterSettings("x", make(tmp_path, model_path))
    with pytest.raises(ConfigError, match=complaint):
        size(WorkerConfig("m", model_path, SMALL, (file,)))


async def test_one_that_the_library_refuses_stops_the_child(tmp_path, model_path):
    """It fits by its header, and its tensors have other shapes than the model's."""
    parts = {f"blk.0.attn_q.weight.lora_{part}": np.zeros((4, 8), np.float32) for part in "ab"}
    file = AdapterSettings("x", write_adapter(tmp_path / "f.gguf", parts))
    engine = EmbeddedEngine(SMALL, model_path, SystemClock(), model="m", pause_tokens=9, adapters=(file,))
    with pytest.raises(ConfigError, match=r"adapters\[x\]\.path: libllama can't load"):
        await engine.start()
    await engine.stop()


def _cut(path):
    Path(path).write_bytes(Path(path).read_bytes()[:-4096])
    return path


def _odd(path):
    return write_adapter(path, {"blk.0.attn_q.weight.lora_a": np.zeros((4, 8), np.float32)})
