"""Short ways to ask the planner."""

from fractions import Fraction
from functools import cache
from pathlib import Path

import msgspec

from hitsend.plan.facts import load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.memory import MemoryPlan, MemoryQuestion, plan_memory
from hitsend.plan.models import find_checkpoint
from hitsend.plan.sizes import Ranks

DATA = Path(__file__).parent / "data"
GIB = 2**30
FACTS = load_facts()

WORKED = {one["id"]: one for one in msgspec.json.decode((DATA / "worked_examples.json").read_bytes())["examples"]}


def answer(name):
    return WORKED[name]["answer"]


@cache
def known(model):
    return find_checkpoint(model, FACTS)


def ask(model, *, tp=1, pp=1, dcp=1, gib=None, gpu=None, **more) -> MemoryPlan:
    return plan_memory(
        MemoryQuestion(
            checkpoint=known(model),
            ranks=Ranks(tp, pp, dcp),
            gpu=None if gpu is None else find_gpu(gpu, FACTS),
            available_kv_bytes=None if gib is None else int(gib * GIB),
            **more,
        )
    )


def whole(value: Fraction) -> int:
    assert value.denominator == 1
    return value.numerator
