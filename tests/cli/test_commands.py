"""The command as a process: what it prints where, and what it doesn't import."""

import json
import os
import subprocess
import sys

import pytest

from hitsend.cli import COMMANDS


def hitsend(*arguments, **env):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HITSEND")}
    return subprocess.run(
        [sys.executable, "-m", "hitsend", *arguments],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_names_every_command_with_one_line():
    ran = hitsend("--help")
    assert ran.returncode == 0
    assert [name for name, line in COMMANDS.items() if name not in ran.stdout or line not in ran.stdout] == []


def test_the_root_imports_neither_server_nor_client_libraries():
    heavy = {"starlette", "uvicorn", "sqlalchemy", "aiohttp", "numpy", "jinja2", "rich.table", "hitsend.serve"}
    program = "import sys, hitsend.cli; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert heavy & set(ran.stdout.split()) == set()


def test_config_show_prints_one_document_with_sources(tmp_path):
    (tmp_path / "my.toml").write_text("[server]\nport = 8001\n")
    flags = ("--config", str(tmp_path / "my.toml"), "--set", "engine.num_slots=3", "--data", "elsewhere", "--json")
    ran = hitsend("config", "show", *flags, HITSEND__LOG__FORMAT="json")
    rows = json.loads(ran.stdout)["settings"]
    assert rows["server.port"] == {"value": 8001, "source": str(tmp_path / "my.toml")}
    assert rows["engine.num_slots"] == {"value": 3, "source": "flag engine.num_slots"}
    assert rows["server.data_dir"]["value"] == "elsewhere"
    assert rows["log.format"] == {"value": "json", "source": "environment HITSEND__LOG__FORMAT"}
    assert rows["access.max_n"]["source"] == "default"


def test_a_stdout_that_takes_nothing_is_one_line():
    for where, status, said in (
        ("/dev/full", 2, "hitsend: what was to be written: No space left on device\n"),
        (None, 0, ""),
    ):
        program = f"exec {sys.executable} -m hitsend config show >{where or '&-'} <&-"
        ran = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (ran.returncode, ran.stderr) == (status, said)


def test_what_opens_first_never_gets_the_number_of_a_closed_stdin():
    inside = "from hitsend.cli import _open_standard; _open_standard(); print(open('/dev/zero').fileno())"
    program = f'exec {sys.executable} -c "{inside}" <&-'
    ran = subprocess.run(["/bin/sh", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert int(ran.stdout) > 2


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("engine.slots=3", "no setting engine.slots"),
        ("engine.num_slots=0", "at least 1"),
        ("engine.num_slots", "FIELD=VALUE"),
    ],
)
def test_a_wrong_setting_is_one_line_on_stderr(flag, said):
    ran = hitsend("config", "show", "--set", flag)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_line_on_stderr():
    ran = hitsend("inspect", "--json", "--url", "http://127.0.0.1:9")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no server at http://127.0.0.1:9" in ran.stderr
