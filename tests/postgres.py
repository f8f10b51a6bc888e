"""A real PostgreSQL server of our own: a fresh cluster in a temp folder, on a free loopback port, ended by its pid."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.served import free_port

USER, PASSWORD = "hitsend", "se-cret"
START_S = 30.0
_PROGRAMS = ("initdb", "postgres", "psql")
_DEBIAN = Path("/usr/lib/postgresql")


def binaries() -> Path | None:
    """The newest folder with the server's programs (Debian keeps them off PATH, one folder per version)."""
    folders = sorted(_DEBIAN.glob("*/bin"), key=lambda path: float(path.parts[-2]), reverse=True)
    folders += [Path(found).resolve().parent for found in (shutil.which("initdb"),) if found]
    return next((folder for folder in folders if all((folder / name).exists() for name in _PROGRAMS)), None)


class Postgres:
    """One cluster. `start` it; `make` databases in it; end it kindly (`stop`) or at once (`immediate`)."""

    def __init__(self, folder: Path, *, is_durable: bool = False) -> None:
        found = binaries()
        assert found is not None, "no PostgreSQL binaries"
        self._bin = found
        self._folder = folder
        self._is_durable = is_durable
        self._numbers = itertools.count()
        self._free: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        # initdb and postgres refuse root
        self._as = {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(folder, "nobody", "nogroup")
        secret = folder / "password"
        secret.write_text(PASSWORD)
        words = ["--username", USER, "--pwfile", str(secret), "--auth", "scram-sha-256", "--encoding", "UTF8"]
        self._run("initdb", "--pgdata", str(self.data), *words, "--no-locale", "--no-sync")

    @property
    def data(self) -> Path:
        return self._folder / "data"

    def url(self, name: str = "postgres") -> str:
        """For `usage.url`."""
        return f"postgresql+asyncpg://{USER}:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        """Start, and wait until it takes connections."""
        words = ["-c", "listen_addresses=127.0.0.1", "-c", f"port={self.port}", "-c", "unix_socket_directories="]
        words += ["-c", "shared_buffers=32MB", "-c", "max_connections=60"]
        words += [] if self._is_durable else ["-c", "fsync=off", "-c", "full_page_writes=off"]
        with (self._folder / "log").open("ab") as log:
            command = [str(self._bin / "postgres"), "-D", str(self.data), *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, **self._as)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, IndexError):  # not there yet, or half written
                status = (self.data / "postmaster.pid").read_text().splitlines()[7].strip()
                if status == "ready":
                    return
            time.sleep(0.02)
        raise RuntimeError("PostgreSQL did not come up:\n" + (self._folder / "log").read_text()[-3000:])

    def stop(self) -> None:
        """Fast: open transactions are rolled back. Safe to call twice."""
        self._end(signal.SIGINT)

    def immediate(self) -> None:
        """As `pg_ctl -m immediate`: nothing is written any more, the next start recovers from the log."""
        self._end(signal.SIGQUIT)

    def pids(self) -> list[int]:
        """The postmaster and all of its children."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """The whole server hangs for the length of the block: it is there, and never answers."""
        pids = self.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def make(self, template: str = "template1") -> str:
        """A new database, a copy of another; its URL."""
        name = f"d{next(self._numbers)}_{os.getpid()}"
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return self.url(name)

    def take(self, template: str) -> str:
        """A copy of `template` that nobody uses: one that was given back, else a new one."""
        return self._free.pop() if self._free else self.make(template)

    def give_back(self, url: str, cleaning: str) -> None:
        """For the next `take`, once `cleaning` has made it as it was."""
        self.sql(cleaning, url.rpartition("/")[2])
        self._free.append(url)

    def sql(self, statement: str, name: str = "postgres") -> str:
        """What psql prints, unaligned and without headings."""
        environment = {"PGPASSWORD": PASSWORD, "PATH": os.environ.get("PATH", "")}
        command = [str(self._bin / "psql"), "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", name]
        done = subprocess.run(
            [*command, "-XAtqc", statement], capture_output=True, text=True, env=environment, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _end(self, number: int) -> None:
        if self.process is None:
            return
        self.process.send_signal(number)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self.process = None

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._bin / program), *words]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self._folder, timeout=120, **self._as
        )
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def postgres(*, is_durable: bool = False) -> Iterator[Postgres]:
    """A started server for the length of the block. `is_durable`: with fsync, as people run it."""
    with tempfile.TemporaryDirectory(prefix="hitsend-pg-", ignore_cleanup_errors=True) as folder:
        server = Postgres(Path(folder), is_durable=is_durable)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def say_missing() -> None:
    """One loud line, however the output is captured."""
    print("\nNO POSTGRESQL HERE: its half of the tests is skipped (apt-get install postgresql)", file=sys.__stderr__)
