"""`hitsend plan`: does it fit, what does it cost.

Enters: names, files and numbers. Leaves: text with every formula and its numbers, or one JSON document. Always true:
the arithmetic is in `plan/`, which knows no server; commands that need one (`tokens`, `cost --from-ledger`) hand
numbers over. Next: `plan_memory.py`, `plan_cost.py`, `plan_data.py`.
"""

import typer

from hitsend.cli import (
    plan_cost,
    plan_data,
    plan_fleet,
    plan_memory,
    plan_rent,
    plan_simulate,
    plan_speed,
    plan_steps,
    plan_tokens,
    plan_train,
)

app = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Plan memory, money and tokens."
)
app.command("memory")(plan_memory.memory)
app.command("check-logs")(plan_memory.check_logs)
app.command("speed")(plan_speed.speed)
app.command("compare")(plan_speed.compare_command)
app.command("check-speed")(plan_speed.check_speed)
app.command("train")(plan_train.train)
app.command("fleet")(plan_fleet.fleet)
app.command("simulate")(plan_simulate.simulate_trace)
app.command("steps")(plan_steps.steps)
app.command("rent-or-buy")(plan_rent.rent_or_buy)
app.command("cost")(plan_cost.cost)
app.command("tokens")(plan_tokens.tokens)
app.add_typer(plan_data.app, name="data")
