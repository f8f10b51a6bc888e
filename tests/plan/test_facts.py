"""plan/facts.py: the shipped data, the user's on top, and what is said about both."""

from datetime import date

import pytest

from hitsend.core.errors import ConfigError
from hitsend.plan.facts import Facts, KnownModel, load_facts, own_facts
from hitsend.plan.facts_check import check_facts
from hitsend.plan.hardware import find_gpu, is_large
from tests.plan.asked import FACTS, GIB

TODAY = date(2026, 11, 29)
OWN = """
[[gpus]]
name = "NVIDIA H200 SXM 141GB"
source = "nvidia-smi"
as_of = 2026-11-01
memory_bytes = 150_000_000_000
bandwidth_bytes_per_s = 4_800_000_000_000
aliases = ["H200"]

[[prices]]
provider = "ours"
model = "house"
source = "contract"
as_of = 2026-11-01
input = "0.1"
output = "0.4"
"""


def kinds(found, kind):
    return {warned.what: warned.message for warned in found if warned.kind == kind}


def test_every_value_has_a_source_and_a_day():
    for entry in (*FACTS.models, *FACTS.gpus, *FACTS.prices, *FACTS.rentals):
        assert entry.source
        assert date(2025, 1, 1) <= entry.as_of <= date(2026, 12, 1)


def test_what_is_stale_expired_or_contradictory_is_said():
    found = check_facts(FACTS, Facts(), TODAY, 180)
    assert "openai:gpt-4o-mini" in kinds(found, "stale")
    assert "workers-ai:@cf/qwen/qwen3.8-27b" not in kinds(found, "stale")
    assert "3.99 USD on 2026-11-09; the newest counts" in kinds(found, "conflict")["RunPod secure: H100 SXM 80GB"]
    assert not kinds(found, "expired")
    later = check_facts(FACTS, Facts(), date(2027, 1, 1), 180)
    assert list(kinds(later, "expired")) == ["google:gemini-3.7-flash"]
    assert len(kinds(later, "stale")) >= len(kinds(found, "stale"))


def test_neurons_and_dollars_that_disagree_are_a_conflict():
    (price,) = [one for one in FACTS.prices if one.model == "@cf/qwen/qwen3.8-27b"]
    changed = Facts(
        prices=(type(price)(**{name: getattr(price, name) for name in price.__struct_fields__} | {"input": "0.50"}),)
    )
    assert kinds(check_facts(changed, Facts(), TODAY, 180), "conflict") == {
        price.name: "input: 40909 neurons are 0.4500 USD, shown are 0.5"
    }


def test_the_users_entries_replace_ours_and_that_is_said(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    facts = load_facts(file)
    assert find_gpu("h200", facts).memory_bytes == 150_000_000_000
    assert len(facts.gpus) == len(FACTS.gpus)
    assert facts.prices[0].name == "ours:house"
    found = check_facts(facts, own_facts(file), TODAY, 180)
    message = kinds(found, "conflict")["NVIDIA H200 SXM 141GB"]
    assert message.startswith(
        "your file replaces the shipped entry; memory_bytes: yours 150000000000, ours 150109106995"
    )
    file.write_text(OWN + OWN)
    assert "it stands 2 times" in kinds(check_facts(FACTS, own_facts(file), TODAY, 180), "conflict")["ours:house"]


def test_shapes_that_contradict_a_stated_total_are_a_conflict():
    (model,) = [one for one in FACTS.models if one.name == "Qwen/Qwen3-8B"]
    wrong = {**model.config, "num_hidden_layers": 40}
    broken = {key: value for key, value in model.config.items() if key != "hidden_size"}
    made = [
        KnownModel(name=name, source="here", as_of=TODAY, config=config, total_params=model.total_params)
        for name, config in (("wrong", wrong), ("broken", broken))
    ]
    found = kinds(check_facts(Facts(models=tuple(made)), Facts(), TODAY, 180), "conflict")
    assert "stated are 8,190,735,360" in found["wrong"]
    assert "'hidden_size' is missing" in found["broken"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[gpus]]\nname = 1", "gpus"),
        ("[[x]]\n", "unknown field `x`"),
        ("[", "own.toml"),
        ('[[gpus]]\nname = "a"', "missing"),
    ],
)
def test_a_users_file_that_is_wrong_is_named(tmp_path, content, said):
    file = tmp_path / "own.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=said):
        load_facts(file)
    with pytest.raises(ConfigError, match="can't read"):
        load_facts(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100", "NVIDIA H100 SXM5 80GB"),
        ("rtx 5090", "NVIDIA RTX 5090"),
        ("mi300x", "AMD MI300X"),
        ("A100", "NVIDIA A100 SXM 80GB"),
        ("b200", "NVIDIA B200 SXM 180GB"),
        ("A6000", "NVIDIA RTX A6000"),
        ("L40", "NVIDIA L40"),
        ("rtx 6000 ada", "NVIDIA RTX 6000 Ada Generation"),
        ("dgx spark", "NVIDIA GB10 (DGX Spark)"),
        ("4070 ti", "NVIDIA RTX 4070 Ti"),
    ],
)
def test_gpus_by_name(name, found):
    assert find_gpu(name, FACTS).name == found


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="--gpu H900: not known"):
        find_gpu("H900", FACTS)
    with pytest.raises(ConfigError, match="--gpu 4060 Ti: more than one matches"):
        find_gpu("4060 Ti", FACTS)


@pytest.mark.parametrize(
    ("name", "large"), [("RTX PRO 6000", True), ("GB10", True), ("H100", True), ("A100", False), ("L40S", False)]
)
def test_large_gpus_are_those_with_70_gib_without_the_a100(name, large):
    """vLLM's `EngineArgs.get_batch_defaults`."""
    assert is_large(find_gpu(name, FACTS)) is large


def test_memory_is_what_a_process_sees():
    assert find_gpu("H200", FACTS).memory_bytes / GIB == pytest.approx(139.8)
    assert all(gpu.memory_bytes > 7 * GIB for gpu in FACTS.gpus)
