"""engine/unmet.py: no setting is left out in silence; each line names the setting, its value and what comes of it."""

import struct
from pathlib import Path

import msgspec
import pytest

from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufTensor
from hitsend.serve.engine.requantise import Q4_1
from hitsend.serve.engine.shape import memory_shape, plan_cells
from hitsend.serve.engine.sizing import sizes
from hitsend.serve.engine.speculating import way_to_speculate
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.unmet import Known, check_settings, uncounted, undrafted, unmet, without_model
from hitsend.settings import EngineSettings
from tests.engine.test_layouts import tiny
from tests.engine.test_shape import SMOL, a_hybrid

HYBRID = a_hybrid(10**9)


def lines(header=SMOL, cores=4, **asked):
    settings = EngineSettings(**({"num_slots": 2} | asked))
    shape = memory_shape(header, settings.kv_type)
    return list(unmet(settings, Known(header, shape, plan_cells(shape, settings), cores)))


def test_what_can_be_done_is_done_without_a_word():
    assert lines() == []
    assert lines(context=512, num_threads=4, num_threads_alone=1, step_tokens=2, prefix_cache_step=256) == []
    assert lines(HYBRID, snapshots=3) == []
    assert lines(layout="auto", layout_max_loss=0.5, kv_type="q8_0", kv_mode="unified") == []
    assert lines(snapshots=0, speculation="off") == []


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"context": 100_000}, "engine.context is 100000, the model was trained on 8192: a sequence gets 8192"),
        ({"reserve_tokens": 9000, "context": 512}, "engine.reserve_tokens is 9000, a sequence has 512 cells at most"),
        ({"num_threads": 5}, "engine.num_threads is 5, this machine has 4 cores: threads wait for each other"),
        ({"num_threads_alone": 8}, "engine.num_threads_alone is 8, this machine has 4 cores"),
        ({"layout_max_loss": 0.5}, "engine.layout_max_loss is 0.5, but engine.layout is as-shipped"),
        ({"blas": "b.so"}, "engine.blas is b.so: it isn't loaded"),
        ({"step_tokens": 1}, "engine.step_tokens is 1, engine.num_slots 2"),
        ({"step_tokens": 2000, "context": 512}, "engine.step_tokens is 2000, there are 1024 cells in all"),
        ({"snapshots": 3}, "engine.snapshots is 3, kept are 0: the model has attention only"),
        ({"prefix_cache_step": 512, "context": 512}, "engine.prefix_cache_step is 512, a sequence has 512 cells"),
        ({"prefix_cache_bytes": 10**6}, "engine.prefix_cache_bytes is 1000000: the shortest saved prefix takes 14"),
        ({"prefix_cache_disk_bytes": 10**6, "prefix_cache_dir": "d"}, "engine.prefix_cache_disk_bytes is 1000000"),
        *(
            (
                {"draft_model": "d.gguf", "speculation": way},
                f"engine.draft_model is d.gguf: it isn't loaded, since engine.speculation is {way}",
            )
            for way in ("off", "prompt_lookup", "mtp")
        ),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_another_is_one_line(asked, line):
    (found,) = lines(**asked)
    assert found.startswith(line)


def test_snapshots_are_as_many_as_there_can_be_and_the_rest_is_said():
    (odd,) = lines(HYBRID, snapshots=6)
    assert odd.startswith("engine.snapshots is 6, kept are 5: 1, 2, 3, 4, 5, 7 can be, within a quarter of engine.kv_")
    (off,) = lines(HYBRID, snapshots=3, speculation="off")
    assert off == "engine.snapshots is 3, kept are 0: engine.speculation is off"
    state = memory_shape(HYBRID).state_bytes_per_slot
    (poor,) = lines(HYBRID, snapshots=7, kv_budget_bytes=2 * 4 * 2 * state)
    assert poor.startswith("engine.snapshots is 7, kept are 2: 1, 2, 3, 4, 5, 7 can be, within a quarter of")


def test_a_backend_that_the_weights_gain_by_is_loaded_without_a_word():
    tensor = GgufTensor("blk.0.attn_q.weight", 0, 960, Q4_1, 1536, (96, 16))
    assert lines(msgspec.structs.replace(SMOL, tensors=(tensor,)), blas="b.so") == []


def test_a_draft_model_of_shorter_texts_is_said(tmp_path):
    draft = str(
        tiny(tmp_path / "d.gguf", llama__block_count=1, llama__embedding_length=64, llama__attention__head_count=2)
    )
    (found,) = lines(draft_model=draft, context=512)
    assert found.startswith(f"engine.draft_model is {draft}, trained on 128 tokens: in sequences of up to 512 ")
    assert undrafted(EngineSettings(draft_model=draft), "it is so") == [
        f"engine.draft_model is {draft}: it isn't loaded, since it is so"
    ]
    assert undrafted(EngineSettings(draft_model=draft), "") == undrafted(EngineSettings(), "it is so") == []


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"speculation": "draft"}, "engine.speculation: draft needs engine.draft_model"),
        ({"prefix_cache_dir": "d"}, "go together, .* they are 'd', 0 and 536870912"),
        ({"prefix_cache_disk_bytes": 5}, "go together, .* they are None, 5 and"),
        ({"prefix_cache_dir": "d", "prefix_cache_disk_bytes": 5, "prefix_cache_bytes": 0}, "'d', 5 and 0"),
        ({"embedding_context": 512}, "engine.embedding_context is 512, but engine.embedding_model isn't set"),
    ],
)
def test_what_contradicts_itself_stops_the_start(asked, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_settings(EngineSettings(**asked))


def test_without_a_model_its_settings_are_for_nobody():
    nobody = EngineSettings(model="none", alias="x", context=512)
    assert without_model(nobody, has_pools=False) == [
        "engine.model is none: there is nothing that engine.alias, engine.context could be for"
    ]
    assert without_model(nobody, has_pools=True) == [
        "engine.model is none: there is nothing that engine.alias could be for"
    ]
    assert without_model(EngineSettings(model="none"), has_pools=False) == []
    assert without_model(EngineSettings(alias="x", context=512), has_pools=False) == []


THE = struct.pack("<Q", 5) + "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}the".encode()
"""A word as the file has it."""


def test_a_budget_says_what_it_does_not_cover():
    (line,) = uncounted(EngineSettings(memory_budget_bytes=5, embedding_model="e.gguf"))
    assert line == "engine.memory_budget_bytes is 5: the process of engine.embedding_model e.gguf isn't counted in it"
    assert uncounted(EngineSettings(memory_budget_bytes=5)) == uncounted(EngineSettings(embedding_model="e")) == []


class Narrow:
    """A decoder whose steps hold two tokens."""

    cells_per_slot, max_batch_tokens = 512, 2


def test_a_step_without_room_for_a_guess_is_not_blamed_on_the_model():
    why = "steps have room for 2 tokens (engine.step_tokens), needed are 3"
    assert way_to_speculate(Narrow(), EngineSettings(), "") == ("off", why)
    with pytest.raises(ConfigError, match="prompt_lookup needs .* taken back, but steps have room for 2"):
        way_to_speculate(Narrow(), EngineSettings(speculation="prompt_lookup"), "")


@pytest.mark.model
async def test_a_model_that_is_loaded_later_is_judged_at_the_start(model_path, mtp_path, tmp_path):
    own = EngineSettings(num_slots=1, context=512, kv_budget_bytes=0)

    async def asked(path, **fields):
        return await sizes([WorkerConfig("later", path, msgspec.structs.replace(own, **fields))])

    (found,) = await asked(model_path, snapshots=3)
    assert found.facts.unmet == (
        "engine.snapshots is 3, kept are 0: the model has attention only and takes guesses back without them",
    )
    with pytest.raises(ConfigError, match="^later: engine.speculation: mtp needs the model's own head, but"):
        await asked(model_path, speculation="mtp")
    await asked(mtp_path, speculation="mtp")
    with pytest.raises(ConfigError, match="^later: engine.blas: engine.libllama isn't set"):
        await asked(model_path, blas="/none.so")
    with pytest.raises(ConfigError, match=r"^later: engine.draft_model: .*mtp.gguf keeps one state per sequence"):
        await asked(model_path, draft_model=mtp_path)
    other = tmp_path / "other.gguf"
    other.write_bytes(Path(model_path).read_bytes().replace(THE, THE.replace(b"the", b"eht"), 1))
    with pytest.raises(ConfigError, match=r"^later: engine.draft_model: .*other.gguf has another vocabulary"):
        await asked(model_path, draft_model=str(other))
    assert await asked(model_path, draft_model=model_path)
