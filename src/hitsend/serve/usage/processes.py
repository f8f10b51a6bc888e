"""How much CPU the server's processes have had, and how long they were kept waiting for it.

Enters: process ids. Leaves: `ProcessTime`s. Always true: read from /proc when somebody looks, never in between; where a
figure isn't there (another system, a process that is gone) nothing is said instead of 0. Next: `metrics.py`.
"""

import os
from pathlib import Path

import msgspec

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class ProcessTime(msgspec.Struct, frozen=True):
    """One process. `cpu_s`: on a core so far. `wait_s`: its threads were ready, but another had the core (None: the
    kernel doesn't say); threads that have ended are no longer in it, so it may fall.
    """

    process: str
    pid: int
    cpu_s: float
    wait_s: float | None


def read_processes(*pids: tuple[str, int | None]) -> tuple[ProcessTime, ...]:
    """Those that are there, by what they do: `edge`, `text`, `engine`, `supervisor`."""
    found = (_read(process, pid) for process, pid in pids if pid is not None)
    return tuple(each for each in found if each is not None)


def _read(process: str, pid: int) -> ProcessTime | None:
    folder = Path("/proc") / str(pid)
    try:
        # the name in parentheses may hold anything: what follows the last one has fields 3, 4, ...
        fields = (folder / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None
    return ProcessTime(process, pid, cpu_s, _waited(folder))


def _waited(folder: Path) -> float | None:
    """Linux counts it per thread, in ns, as the second number of schedstat."""
    try:
        threads = list((folder / "task").iterdir())
        return sum(int((thread / "schedstat").read_text("ascii").split()[1]) for thread in threads) / 1e9
    except (OSError, ValueError, IndexError):
        return None
