"""What was spent by kind of token, and what is left: in whole micro-dollars that add up to the rows."""

import msgspec
import pytest

from hitsend.core.limits import Level, Limits
from hitsend.serve.usage.report import Totals
from hitsend.serve.usage.spent import NAMES, Spent, budgets, spent
from hitsend.serve.usage.statement import GROUPS, stream_rows
from tests.usage.storage import storage
from tests.usage.test_statement import DAY_S, fill


@pytest.fixture
def url(new_url):
    return new_url()


@pytest.mark.parametrize("by", GROUPS)
async def test_kinds_add_up_to_the_rows_of_everybody_and_of_one_key(url, by):
    async with storage(url) as opened:
        await fill(opened)
        for key_id in (None, "k3", "nobody"):
            found = await spent(opened.database, by, key_id, None, None)
            every = [numbered.row async for numbered in stream_rows(opened.database)]
            rows = [row for row in every if key_id in (None, row.key_id)]
            assert found.totals.cost_microusd == sum(row.cost_microusd for row in rows)
            assert found.totals.requests == len(rows) == (0 if key_id == "nobody" else 30 if key_id is None else 6)
            for part in (found, *found.parts):
                totals: Totals = part.totals
                assert sum(kind.cost_microusd for kind in part.kinds) == totals.cost_microusd
                assert [kind.kind for kind in part.kinds] == list(NAMES)
                tokens = {kind.kind: kind.num_tokens for kind in part.kinds}
                assert tokens["input"] + tokens["cached_input"] == totals.prompt_tokens
                assert tokens["output"] + tokens["reasoning"] == totals.completion_tokens
            assert msgspec.json.decode(msgspec.json.encode(found), type=Spent) == found


async def test_budgets_say_what_is_left_and_never_less_than_nothing(url):
    async with storage(url) as opened:
        await fill(opened)
        everything = (await spent(opened.database, "day", None, None, None)).totals.cost_microusd
        opened.clock.seconds -= DAY_S / 8  # the day of the last row
        limits = Limits(usd_per_day_microusd=1, usd_per_month_microusd=10**9)
        found = await budgets(opened.database, opened.clock, (Level("global", (), limits), Level("key", ("k3",))))
        day, month = found
        assert (day.level, day.name, day.left_microusd) == ("global", "usd_per_day", 0)
        assert month.spent_microusd == everything
        assert month.left_microusd == 10**9 - everything
        assert month.since.endswith("-01")
