"""Lua's numbers are doubles: no sum or product of the scripts may reach 2^53, whatever is asked."""

import itertools
import math
import random
import re
from importlib.resources import files

from hitsend.core.limits import MAX_PER_MINUTE, Microusd
from hitsend.serve.access import valkey
from hitsend.serve.access.limits import DAY_US, UNITS
from hitsend.serve.access.quota import Used
from tests.access.books import asking, org

EXACT = 2**53
TEXT = (files("hitsend.serve.access") / "lua" / "levels.lua").read_text()
LUA = {name: int(value) for name, value in re.findall(r"^local ([A-Z_]+) = (\d+)$", TEXT, re.MULTILINE)}
MOST_BUDGET = Microusd.__metadata__[0].le


def test_the_scripts_and_the_core_count_in_the_same_units():
    assert (LUA["UNITS"], LUA["DAY_US"]) == (UNITS, DAY_US)


def test_tokens_stay_exact():
    full, most = MAX_PER_MINUTE * LUA["UNITS"], LUA["MOST_UNITS"]
    assert full <= most  # a whole bucket may be missing
    assert most < EXACT  # missing, and the room above it that a debt is compared with before it is added
    assert full < EXACT  # what is asked, given back or owed, in units
    assert (MAX_PER_MINUTE + 1) * 2 < EXACT  # input and output of one request, as they are sent
    huge = asking("r", org(requests_per_minute=1), tokens=(10**30, 10**30), held=10**30)
    assert valkey._reserve_args(huge, is_preview=False)[1:4] == [MAX_PER_MINUTE + 1] * 2 + [valkey.MOST_MONEY]
    assert valkey._settle_args(huge, Used(0, 3 * 10**30, 10**30), None)[1:6] == [
        *(0, MAX_PER_MINUTE, -MAX_PER_MINUTE),
        *(valkey.MOST_MONEY, valkey.MOST_MONEY),
    ]


def test_the_product_of_rate_and_time_is_only_formed_where_it_is_exact_and_else_refills_all():
    """`elapsed >= MOST_UNITS / rate` in doubles decides just as in integers, or the two ways give the same."""
    draw, most = random.Random(5), LUA["MOST_UNITS"]
    rates = [1, 2, 3, 7, 59, 60, 61, MAX_PER_MINUTE - 1, MAX_PER_MINUTE]
    rates += [draw.randint(1, MAX_PER_MINUTE) for _ in range(3_000)]
    for rate, off in itertools.product(rates, (-2, -1, 0, 1, 2)):
        elapsed = most // rate + off
        if elapsed < 1:
            continue
        if float(elapsed) >= float(most) / float(rate):
            assert elapsed * rate >= most  # nothing can be missing after that
        else:
            assert elapsed * rate < EXACT


def test_money_stays_exact():
    spent = held = LUA["MOST_MONEY"]
    assert valkey.MOST_MONEY == MOST_BUDGET + 1  # refused by every budget
    assert spent + held + valkey.MOST_MONEY < EXACT
    assert spent > MOST_BUDGET  # what is capped is over every budget, so the verdict is the same


def test_time_stays_exact_and_days_are_whole_until_the_year_2255():
    assert 2255 < 1970 + EXACT / (DAY_US * 365.2425) < 2256
    for day in (0, 1, 20_000, 65_536, EXACT // DAY_US):
        assert math.floor(float(day * DAY_US) / float(DAY_US)) == day
        assert day == 0 or math.floor(float(day * DAY_US - 1) / float(DAY_US)) == day - 1
