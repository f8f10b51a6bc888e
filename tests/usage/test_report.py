from datetime import date

import msgspec

from hitsend.core.request import Principal, Usage
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.report import Totals, UsageReport, usage_report
from tests.usage.storage import storage, wanted


async def test_the_report_adds_up_in_every_direction(url):
    async with storage(url) as opened:
        spent = 0
        for number in range(12):
            caller = Principal(key_id=f"k{number % 3}", name=f"n{number % 3}") if number % 4 else Principal()
            hold = await opened.ledger.reserve(wanted(f"r{number}", principal=caller, model=f"m{number % 2}"))
            usage = Usage(100 + number, 10, 50, 5)
            spent += (await opened.ledger.settle(hold, Settlement(usage, "stop", number % 2))).cost_microusd
            opened.clock.seconds += 43_200
        await opened.ledger.reserve(wanted("open"))
        report = await usage_report(opened.database)
        assert report.totals == Totals(12, 1266, 600, 120, 60, 6, spent, 0)
        for parts in (report.by_model, report.by_caller, report.by_day):
            for name in Totals.__struct_fields__:
                assert sum(getattr(part.totals, name) for part in parts) == getattr(report.totals, name)
        assert {caller.key_id for caller in report.by_caller} == {None, "k0", "k1", "k2"}
        assert report.holds_open == 1
        first = date.fromisoformat(report.by_day[1].day)
        some = await usage_report(opened.database, first, first)
        assert some.totals == report.by_day[1].totals
        assert msgspec.json.decode(msgspec.json.encode(report), type=UsageReport) == report


async def test_an_empty_ledger_reports_zeros(url):
    async with storage(url) as opened:
        assert await usage_report(opened.database) == UsageReport()
