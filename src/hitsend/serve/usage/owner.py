"""Who holds: one server process, named so that others can tell whether it still lives.

Enters: what Linux says about a process (nothing elsewhere: then only leases count). Leaves: an owner's name. Always
true: a living process is never called dead: a pid is judged only within its own boot and pid namespace, and by its
start time, because pids are used again. Next: `ledger.py`.
"""

import os
import secrets
from pathlib import Path

_PROC = Path("/proc")


def this_process() -> str:
    """A name for this process and this start of the ledger: boot, pid namespace, pid, start time, random."""
    pid = os.getpid()
    return ":".join((_boot(), _namespace(), str(pid), _started(pid) or "?", secrets.token_hex(4)))


def is_dead(owner: str) -> bool | None:
    """Whether that process is gone for sure; None when it can't be known from here.

    That is so for another machine, boot or container, and for an earlier owner inside this very process.
    """
    parts = owner.split(":")
    if len(parts) != 5 or "?" in parts or not parts[2].isdecimal():
        return None
    boot, namespace, pid, started, _ = parts
    if (boot, namespace) != (_boot(), _namespace()):
        return None
    if _started(int(pid)) != started:
        return True
    return None if int(pid) == os.getpid() else False


def _boot() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "?"


def _namespace() -> str:
    try:
        return (_PROC / "self/ns/pid").readlink().name.removeprefix("pid:").strip("[]")
    except OSError:
        return "?"


def _started(pid: int) -> str | None:
    """Clock ticks from boot to the process's start, or None if there is no such process (a zombie counts as none)."""
    try:
        # the command name may hold spaces and parentheses: fields are counted from the last one
        fields = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
