"""Embedded models as the settings name them: what can't be meant stops the start, in words."""

from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from hitsend import settings
from hitsend.core.clock import SystemClock
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.children import Children, engine_settings
from hitsend.serve.engine.layouts import converted_path
from hitsend.serve.engine.models import ModelFile
from hitsend.serve.engine.startup import WorkerConfig
from hitsend.serve.engine.tuned import Measured, Tuned, Way, tuned_file
from hitsend.serve.engine.weights import laid_out
from hitsend.serve.pools import _plan, adapters_of, build_pools, check_names, hold_layouts
from hitsend.serve.supervisor import _supervise

DEFAULT = WorkerConfig("main", "main.gguf", settings.EngineSettings())


@pytest.fixture
def model(tmp_path):
    """A header of a model, with 1,024 bytes of weights."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_block_count, 2),
        (writer.add_context_length, 512),
        (writer.add_embedding_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 2),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def tree(*engines, adapters=(), budget=None):
    engine = settings.EngineSettings(memory_budget_bytes=budget, num_slots=4, kv_budget_bytes=0)
    return settings.Settings(engine=engine, engines=engines, adapters=adapters)


def pooled(name, model, **fields):
    return settings.PooledSettings(name, model, **fields)


async def built(asked, tmp_path, default=None):
    return await build_pools(asked, default, tmp_path, SystemClock())


async def test_memory_is_predicted_from_the_header_with_each_models_own_settings(tmp_path, model):
    one = pooled("one", model, aliases=("a", "b"), num_slots=2, context=256, max_waiting=3, idle_unload_s=0)
    found = await built(tree(one, pooled("two", model, num_slots=1), budget=10**6), tmp_path)
    first, second = found.models
    # 2 layers, keys and values, 2 heads of 16, two bytes each: 256 bytes a token
    assert first.engine.member.num_bytes == 1024 + 2 * 256 * 256
    assert second.engine.member.num_bytes == 1024 + 512 * 256
    assert (first.engine.facts.cells_per_slot, second.engine.facts.cells_per_slot) == (256, 512)
    assert (first.by_name, second.served) == ({"a": None, "b": None}, ("tiny",))
    assert (first.engine.model.max_waiting, first.engine.member.idle_s) == (3, None)
    assert first.engine.state().is_ready


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"name": "embedded"}, "'embedded' is taken"),
        ({"name": "there"}, "'there' is taken"),
        ({"name": ""}, "'' is taken, or empty"),
        ({"model": "none-such"}, r"engines\[x\]\.model: 'none-such' is no file"),
        ({"num_slots": 200}, r"memory_budget_bytes is 1000000: 'x' takes 26215424 bytes .* 25215424 too many"),
    ],
)
async def test_a_model_that_cannot_be_meant_is_named(tmp_path, model, fields, complaint):
    there = settings.UpstreamSettings("there", "http://127.0.0.1:1/v1", {"a": "b"})
    asked = tree(there, pooled(**({"name": "x", "model": model} | fields)), budget=10**6)
    with pytest.raises(ConfigError, match=complaint):
        await built(asked, tmp_path)


async def test_a_model_has_the_layout_that_is_asked_for_it_or_for_all(tmp_path, model):
    asked = tree(pooled("one", model, aliases=("a",)), pooled("two", model, layout="as-shipped"))
    engine = msgspec.structs.replace(asked.engine, layout="q8_0")
    found = await built(msgspec.structs.replace(asked, engine=engine), tmp_path)
    one, two = (each.engine for each in found.models)
    assert (one.facts.layout, two.facts.layout) == ("q8_0", "as-shipped")
    # 256 values of four bytes become 8 blocks of 34; cells are those of the rest of the file
    assert (one.facts.weights_bytes, two.facts.weights_bytes) == (8 * 34, 1024)
    assert two.member.num_bytes - one.member.num_bytes == 1024 - 8 * 34


async def test_a_layout_that_changes_nothing_names_the_model_that_it_was_asked_for(tmp_path, model):
    with pytest.raises(ConfigError, match=r"^engines\[x\]\.layout: .*q4_0\+offsets changes nothing in this model"):
        await built(tree(pooled("x", model, layout="q4_0+offsets")), tmp_path)


def measured(models_dir, model, engine, *rows):
    """As if `models tune` had been here."""
    shipped = Measured(Way(), 200.0, {1: 80.0}, 0.0, 0.0, 2, 2, alone=90.0)
    file = tuned_file(ModelFile(model, "m", "path"), models_dir, engine)
    file.write_bytes(msgspec.json.encode(Tuned("m", "here", "b", 10.0, 48, (shipped, *rows))))


FASTER = Measured(Way("q8_0"), 400.0, {1: 160.0}, 0.0, 0.0, 1, 1, gain=2.0)


def test_auto_goes_by_what_was_measured_of_this_model(tmp_path, model):
    asked = tree(pooled("one", model, layout="auto"), pooled("two", model, layout="auto", num_threads=1))
    measured(tmp_path, model, asked.engine)
    measured(tmp_path, model, msgspec.structs.replace(asked.engine, num_threads=1), FASTER)
    one, two = (each.config for each in _plan(asked, tmp_path))
    assert (one.model_path, one.settings.num_threads_alone) == (model, 1)
    assert read_header(two.model_path).metadata["hitsend.layout"] == "q8_0"
    assert two.settings.num_threads_alone == 0


def test_tidying_for_one_model_leaves_the_copies_of_another(tmp_path, model):
    asked = tree(pooled("one", model, layout="bf16"), pooled("two", model, layout="auto", num_threads=1))
    auto = msgspec.structs.replace(asked.engine, layout="auto")
    measured(tmp_path, model, auto)
    measured(tmp_path, model, msgspec.structs.replace(auto, num_threads=1), FASTER)
    targets = [converted_path(Path(model), tmp_path, recipe) for recipe in ("bf16", "q8_0", "q4_0")]
    for target in targets:
        target.write_bytes(b"GGUF")
    hold_layouts(asked, tmp_path)
    laid_out(ModelFile(model, "main", "path"), tmp_path, auto, lambda _: None)
    assert [target.exists() for target in targets] == [True, True, False]


def test_a_draft_model_and_what_needs_one_are_each_models_own(tmp_path, model):
    shared = settings.EngineSettings(speculation="draft", draft_model="/none/such.gguf", snapshots=2)
    asked = settings.Settings(
        engine=shared, engines=(pooled("one", model), pooled("two", model, draft_model=model, speculation="draft"))
    )
    one, two = (each.config.settings for each in _plan(asked, tmp_path))
    assert (one.speculation, one.draft_model, one.snapshots) == ("auto", None, None)
    assert (two.speculation, two.draft_model) == ("draft", model)
    missing = tree(pooled("x", model, draft_model="/none/such.gguf"))
    with pytest.raises(ConfigError, match=r"^engines\[x\]\.draft_model: there is no file /none/such\.gguf"):
        _plan(missing, tmp_path)


async def test_what_always_stays_counts_also_where_another_engine_has_its_model_s_name(tmp_path, model):
    asked = tree(pooled("one", model, aliases=("other",)), budget=10**6)
    default = WorkerConfig("one", model, asked.engine)
    with pytest.raises(ConfigError, match="'one' takes 525312 bytes .* beside 525312 of what always stays"):
        await built(asked, tmp_path, default)


async def test_adapters_belong_to_a_model_that_is_there(tmp_path):
    of_none, of_main, of_other = (
        settings.AdapterSettings("red", "r.gguf", model=model) for model in (None, "main", "other")
    )
    asked = tree(adapters=(of_none, of_main, of_other))
    assert adapters_of(asked, ("main",), is_default=True) == (of_none, of_main)
    assert adapters_of(asked, ("other", "x")) == (of_other,)
    with pytest.raises(ConfigError, match=r"adapters\[red\]\.model: no embedded model is served as 'other'.*main"):
        await built(tree(adapters=(of_other,)), tmp_path, DEFAULT)
    with pytest.raises(ConfigError, match="it has to be named"):
        await built(tree(adapters=(of_none,)), tmp_path)
    assert await built(tree(adapters=(of_main,)), tmp_path, DEFAULT) is None


def test_a_draft_model_that_is_not_there_is_named_by_its_own_setting():
    asked = settings.Settings(engine=settings.EngineSettings(draft_model="/none/such.gguf"))
    with pytest.raises(ConfigError, match=r"^engine\.draft_model: there is no file /none/such\.gguf"):
        engine_settings(asked, ModelFile("x.gguf", "main", "test"))


def test_a_name_means_one_model():
    check_names(["a", "b"])
    for names in (["a", "b", "a"], ["a", ""]):
        with pytest.raises(ConfigError, match="means two models"):
            check_names(names)


@pytest.mark.parametrize("names", [("main",), ("red", "red")])
def test_an_adapter_takes_no_other_model_s_name(names):
    adapters = tuple(settings.AdapterSettings(name, "r.gguf") for name in names)
    children = Children(ModelFile("x.gguf", "main", "test"), object(), object(), None, adapters=adapters)
    with pytest.raises(ConfigError, match="means two models"):
        children.check()


async def test_several_processes_refuse_models_that_come_and_go(model):
    asked = settings.Settings(server=settings.ServerSettings(workers=2), engines=(pooled("x", model),))
    with pytest.raises(ConfigError, match=r"server\.workers: 2 processes.*engines\[x\] is of kind embedded"):
        await _supervise(asked)
