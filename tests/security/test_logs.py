"""What is logged is one entry, whatever is in it; what a database failed at isn't in it."""

import ast
import json
import logging

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.logs import set_up_logs
from hitsend.settings import LogSettings
from tests.architecture.tree import name, nodes, sources

EVIL = "a\r\n12:00:00 error hitsend: forged\x1b[2J\x07\x00\x85\u2028\u202e\u200fb\ud83d\x9b31m"


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = kept
    root.setLevel(level)


@pytest.mark.parametrize("form", ["pretty", "json"])
def test_no_text_forges_an_entry_or_commands_a_terminal(form, capsys, root_logger):
    set_up_logs(LogSettings(format=form))
    logging.getLogger("hitsend.test").warning("said %s", EVIL)
    logging.getLogger("hitsend.test").warning("größer 日本")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(char.isprintable() for line in lines for char in line)
    assert "forged" in lines[0]
    if form == "json":
        assert json.loads(lines[0])["message"] == f"said {EVIL}"
    else:
        assert "größer 日本" in lines[1]


async def test_a_statement_that_failed_is_told_without_its_values(tmp_path):
    database = await Database.open(database_url(None, tmp_path))
    try:
        insert = text("INSERT INTO nowhere VALUES (:secret)")
        with pytest.raises(SQLAlchemyError) as failed:
            await database.write(lambda c: c.execute(insert, {"secret": "CANARY-VALUE"}))
        assert "CANARY" not in str(failed.value)
        assert "CANARY" not in repr(failed.value)
    finally:
        await database.close()


def test_every_database_is_opened_so():
    opened = [
        (name(path), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("hide_parameters"))
        for path in sources()
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("create_engine", "create_async_engine")
    ]
    assert len(opened) >= 2
    assert [place for place, hides in opened if hides != "True"] == []


def test_debug_shows_no_statements(root_logger, capsys):
    set_up_logs(LogSettings(level="debug"))
    for logger in ("aiosqlite", "sqlalchemy.engine", "asyncpg"):
        logging.getLogger(logger).debug("executing INSERT with CANARY-VALUE")
    assert capsys.readouterr().err == ""


def test_strangers_can_not_fill_the_log(root_logger, capsys):
    set_up_logs(LogSettings())
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    assert capsys.readouterr().err == ""
