import asyncio
import csv
import io
import json

import pytest
from typer.testing import CliRunner

from hitsend.cli import CallFailed, usage
from hitsend.cli.statement import safe
from hitsend.core.request import Principal, Usage
from hitsend.serve.database.connection import database_url
from hitsend.serve.usage.ledger import Settlement
from hitsend.serve.usage.pricing import Price
from tests.usage.storage import storage, wanted

EVIL = '=HYPERLINK("http://example.invalid","x")'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A ledger of 12 rows of three keys, two of them on the last day, one key with a name made for a spreadsheet."""
    path = tmp_path_factory.mktemp("ledger")

    async def fill():
        async with storage(database_url(None, path)) as opened:
            for number in range(12):
                name = (EVIL, "b", "@c")[number % 3]
                caller = Principal(key_id=f"k{number % 3}", name=name, app="a", org="o")
                price = Price("n", 11_000_000_000, 0, in_neurons=True) if number % 2 else Price("u", 450_000, 3_200_000)
                hold = await opened.ledger.reserve(wanted(f"r{number}", principal=caller, price=price))
                await opened.ledger.settle(hold, Settlement(Usage(20, 5), "stop"))
                opened.clock.seconds += 8_640.0

    asyncio.run(fill())
    return path


def run(folder, *words):
    result = CliRunner().invoke(usage.app, ["--data", str(folder), *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("words", [("--by", "key"), ("--by", "app"), ("--by", "day"), ("--rows",), ()])
def test_the_lines_of_a_csv_add_up_to_its_last(folder, words):
    lines = list(csv.DictReader(io.StringIO(run(folder, *words, "--csv"))))
    assert lines[-1]["kind"] == "total"
    added = [line for line in lines if line["kind"] in ("part", "row", "allowance")]
    assert len(added) == len(lines) - 1
    for name in ("cost_microusd", "neurons_micro"):
        assert sum(int(line[name] or 0) for line in added) == int(lines[-1][name])
    assert {"allowance"} <= {line["kind"] for line in lines}


def test_json_says_the_same_by_parts_and_by_rows(folder):
    parts = json.loads(run(folder, "--by", "user", "--json"))
    rows = json.loads(run(folder, "--rows", "--json"))
    assert len(rows["rows"]) == 12
    for name in ("totals", "neurons_micro", "allowance", "due_microusd"):
        assert rows[name] == parts[name]


def test_days_are_given_by_either_name_and_both_are_included(folder):
    day = json.loads(run(folder, "--by", "day", "--json"))["parts"][0]["of"]["day"]
    one = run(folder, "--from", day, "--to", day, "--by", "day", "--json")
    assert [part["of"]["day"] for part in json.loads(one)["parts"]] == [day]
    assert run(folder, "--since", day, "--until", day, "--by", "day", "--json") == one


def test_no_cell_is_a_formula(folder):
    for words in (("--by", "key"), ("--rows",)):
        text = run(folder, *words, "--csv")
        cells = [cell for line in csv.reader(io.StringIO(text)) for cell in line]
        assert f"'{EVIL}" in cells
        assert not [c for c in cells if c.startswith(("=", "+", "@")) or (c.startswith("-") and not _is_number(c))]
    assert [safe(text) for text in ("=1", "  =1", "\t=1", "-1", "+1", "@x", "fine", 5, None)] == [
        "'=1",
        "'  =1",
        "'\t=1",
        "'-1",
        "'+1",
        "'@x",
        "fine",
        5,
        "",
    ]


def _is_number(cell):
    return cell.removeprefix("-").replace(".", "").isdecimal()


def test_for_the_eye(folder):
    table = run(folder, "--by", "org")
    assert [line.split()[0] for line in table.splitlines()] == ["requests", "o", "total", "free", "free", "due"]
    assert len(run(folder, "--rows").splitlines()) == 12 + 2 + 1


def test_two_answers_at_once_are_none(folder):
    for words in (("--csv", "--json"), ("--rows", "--by", "key")):
        with pytest.raises(CallFailed, match="one of them"):
            run(folder, *words)


@pytest.mark.parametrize("words", [(), ("--rows",), ("--by", "day"), ("--csv",)])
def test_days_in_the_wrong_order_are_no_days(folder, words):
    with pytest.raises(CallFailed, match="--from 2027-01-16 is later than --to 2027-01-15"):
        run(folder, "--from", "2027-01-16", "--to", "2027-01-15", *words)


def test_an_empty_ledger_has_a_total_of_nothing(tmp_path):
    assert json.loads(run(tmp_path, "--rows", "--json"))["due_microusd"] == 0
    assert run(tmp_path, "--by", "app", "--csv").splitlines()[1].startswith("total,,0")
