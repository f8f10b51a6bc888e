"""What a request cost, and what happened to it.

Enters: a hold before work starts, counts when it ended, records and figures. Leaves: exactly one ledger row per hold,
the usage report, stored flight records and responses, `/metrics`. Always true: money is integer micro-dollars; a row is
never changed; a database failure ends the request it hits and no other. Read `meter.py`, `pricing.py`, `rows.py`,
`ledger.py`, `report.py`, `records.py`, `responses.py`, `metrics.py`.
"""
