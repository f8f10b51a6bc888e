"""Limits in memory and a real ledger; what every kind of `Quota` does is in test_quota.py."""

import pytest

from hitsend.core.errors import InsufficientQuota, StorageFailed
from hitsend.core.limits import Level, Limits
from hitsend.core.request import Principal, Usage
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.report import Spending
from tests.access.books import asking, org
from tests.usage.storage import QWEN, storage, wanted


async def test_a_restart_forgets_no_spending_of_any_level(url):
    callers = {
        "ann": Principal("k1", "n", user="ann", app="bot", org="acme"),
        "bob": Principal("k2", "n", user="bob", app="bot", org="acme"),
        "eve": Principal("k3", "n", app="bot", org="evil"),
        "app-less": Principal("k4", "n", user="ann", org="acme"),
    }
    async with storage(url) as opened:
        cost = {}
        for number, (name, caller) in enumerate(callers.items()):
            hold = await opened.ledger.reserve(wanted(name, principal=caller, price=QWEN))
            cost[name] = (
                await opened.ledger.settle(hold, Settlement(Usage(1000 * (number + 1)), "stop"))
            ).cost_microusd
        await opened.ledger.reserve(wanted("still open", principal=callers["ann"]))
        spending = Spending(opened.database)
        expected = {
            Level("global", ()): sum(cost.values()),
            Level("org", ("acme",)): cost["ann"] + cost["bob"] + cost["app-less"],
            Level("app", ("acme", "bot")): cost["ann"] + cost["bob"],
            Level("app", ("evil", "bot")): cost["eve"],
            Level("user", ("acme", "bot", "ann")): cost["ann"],
            Level("user", ("acme", "", "ann")): cost["app-less"],
            Level("key", ("k2",)): cost["bob"],
            Level("key", ("unused",)): 0,
        }
        today = "2027-01-15"
        for level, spent in expected.items():
            assert await spending.spent_microusd(level, today) == spent
            assert await spending.spent_microusd(level, "2027-01-16") == 0
        quota = MemoryQuota(opened.clock, spending)
        ann = Level("user", ("acme", "bot", "ann"), Limits(usd_per_day_microusd=cost["ann"] + 10))
        await quota.reserve(asking("a", ann, held=10))
        with pytest.raises(InsufficientQuota):
            await quota.reserve(asking("b", ann, held=1))
        opened.clock.seconds += 86_400
        await quota.reserve(asking("b", ann, held=1))


async def test_a_ledger_that_is_away_is_said_so(tmp_path):
    async with storage(database_url(None, tmp_path)) as opened:
        await opened.database.write(lambda c: c.exec_driver_sql("ALTER TABLE ledger RENAME TO elsewhere"))
        with pytest.raises(StorageFailed, match="org acme"):
            await Spending(opened.database).spent_microusd(org(), "2027-01-15")
