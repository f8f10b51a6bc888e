"""What tests share: a real server with the bundled model, a PostgreSQL server, and fresh databases of either kind."""

import asyncio
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import pytest

from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.schema import METADATA
from tests.chosen import nothing_chosen
from tests.postgres import Postgres, binaries, postgres, say_missing
from tests.served import Served, serving

hypothesis.settings.register_profile("no seconds are asserted", deadline=None)
hypothesis.settings.load_profile("no seconds are asserted")


# What tests import, and the servers that they start import, is compiled once and not in each of hundreds of processes,
# whatever the shell says; `make clean` removes it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded here stays for the whole run: the collector needn't walk through it, now or at each test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose every test `-m` leaves out aren't even imported: some import client libraries or write requests."""
    if collection_path.suffix == ".py" and nothing_chosen(collection_path.read_text(), config.option.markexpr):
        return True
    return None  # for others to say


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """Eight slots of 1,024 tokens, every step checked for lost cells, text captured."""
    with serving(
        *("--set", "engine.num_slots=8", "--set", "engine.context=1024", "--set", "engine.check_every_step=true"),
        *("--set", "record.text=true", "--set", "stream.ping_s=0.5", "--set", "record.ring=5000"),
        *("--set", "engine.wait_timeout_s=300"),  # a slow machine is no fault
    ) as server:
        yield server


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each journey nothing runs, waits, holds cells or an open hold, and the accounting found no fault."""
    yield
    if "served" not in request.fixturenames:
        return
    state = request.getfixturevalue("served").wait_idle()
    left = {
        name: state[name]
        for name in ("running", "waiting", "cells_used", "slots_used", "holds_open", "quota_holds_open")
    }
    assert not any(left.values()), left
    assert state["engine"]["check"] is None


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """A cluster for the whole run, with a database `filled` that has the newest schema. Skips where there is none."""
    if binaries() is None:
        say_missing()
        pytest.skip("PostgreSQL is not installed")
    with postgres() as server:
        server.sql("CREATE DATABASE filled")

        async def fill() -> None:
            await (await Database.open(server.url("filled"))).close()

        with ThreadPoolExecutor(1) as apart:  # from the event loop of the test that asked first
            apart.submit(asyncio.run, fill()).result()
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Makes fresh databases: on SQLite, and once more the same test on PostgreSQL."""
    if request.param == "sqlite":
        numbers = itertools.count()
        yield lambda: database_url(None, tmp_path / f"database-{next(numbers)}")
        return
    server = request.getfixturevalue("postgres_server")
    made: list[str] = []

    def make() -> str:
        made.append(server.take("filled"))
        return made[-1]

    yield make
    names = ", ".join(table.name for table in METADATA.sorted_tables)
    for url in made:
        server.give_back(url, f"TRUNCATE {names} RESTART IDENTITY")


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    """One fresh database."""
    return new_url()
