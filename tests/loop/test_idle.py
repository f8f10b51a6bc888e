"""Idle work makes way: its prompts come last, and never fill a step."""

from hitsend.core.request import IDLE_TIER
from hitsend.serve.access.terms import MAX_TIER
from hitsend.serve.loop.messages import StepReport
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.scheduler import IDLE_TOKENS
from tests.loop.driven import Driven, submit

LIMITS = LoopLimits(step_tokens=4 * IDLE_TOKENS, reserve_tokens=4, max_waiting=64, check_every_step=True)


def roomy():
    return Driven(limits=LIMITS, num_slots=6, cells_per_slot=4096)


def prefilled(reports):
    rows = [row for report in reports if isinstance(report, StepReport) for row in report.rows]
    return {row.request_id: row.prefill_tokens for row in rows if row.prefill_tokens}


def test_no_caller_can_have_that_tier():
    assert IDLE_TIER > MAX_TIER


def test_a_step_has_few_tokens_of_it_and_the_newcomer_s_prompt_at_once():
    driven = roomy()
    driven.handle(
        *(submit(f"idle-{number}", IDLE_TOKENS + number, tier=IDLE_TIER, max_tokens=2) for number in range(4))
    )
    assert sum(prefilled(driven.step()).values()) <= IDLE_TOKENS
    driven.handle(submit("guest", 2 * IDLE_TOKENS, tier=1, max_tokens=2))
    second = prefilled(driven.step())
    assert second["guest"] == 2 * IDLE_TOKENS
    assert sum(tokens for name, tokens in second.items() if name != "guest") <= IDLE_TOKENS
    driven.run()
    assert len(driven.done) == 5


def test_what_is_no_idle_work_may_fill_a_step():
    driven = roomy()
    driven.handle(submit("guest", 4 * IDLE_TOKENS, tier=MAX_TIER, max_tokens=2))
    assert prefilled(driven.step()) == {"guest": 4 * IDLE_TOKENS}
