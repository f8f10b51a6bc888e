"""Converted copies of a model's weights: where they lie, and made when they are not there yet.

Enters: a model file and a recipe. Leaves: the path of the converted file in MODELS_DIR/layouts. Always true: one
conversion at a time of one file, also between two servers (a lock); it happens in a child process, so that a hostile
file can hurt nothing else, and one that was interrupted leaves nothing that could be loaded; the name is made of the
source's SHA-256 and the recipe, so a changed source is converted anew; what some process holds is not deleted; a folder
that can't be used is a ConfigError. Next: `convert.py`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.convert import NO_ROOM, NoRoom
from hitsend.serve.engine.offsets import offsets_path

AS_SHIPPED = "as-shipped"

_EDITION = 1
"""Counts up when a recipe gives other bytes than before."""

_CHUNK_BYTES = 4 * 1024 * 1024
_KNOWN = "known.json"

Say = Callable[[str], None]

_held: dict[Path, int] = {}
"""Descriptors with locks of the copies that this process runs on, as long as it lives: a new child opens them again."""


def layouts_dir(models_dir: Path) -> Path:
    """Where converted files lie."""
    return models_dir / "layouts"


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """What the system refuses there is a ConfigError."""
    try:
        yield
    except OSError as failure:
        raise ConfigError(f"engine.layout: can't use {failure.filename or folder}: {failure.strerror}") from failure


@contextmanager
def measuring_alone(models_dir: Path, say: Say | None) -> Iterator[bool]:
    """One process at a time: two would slow each other, and delete what the other measures. Raises ConfigError.

    Without `say` it doesn't wait for another one: False then, there is one.
    """
    folder = layouts_dir(models_dir)
    with _usable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "tune.lock").open("ab")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is None:
                yield False
                return
            say(f"another process is measuring for {folder}: waiting until it is done")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield True


def hold(source: Path, models_dir: Path, recipe: str) -> None:
    """Nobody deletes this copy while this process lives, whether it is there yet or not. Raises ConfigError."""
    target = converted_path(source, models_dir, recipe)
    with _usable(target.parent):
        if target not in _held:
            lock = os.open(target.with_suffix(".use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_SH)
            _held[target] = lock


def converted_path(source: Path, models_dir: Path, recipe: str) -> Path:
    """Where the converted copy of this source is, or would be. Reads the source once, to know its SHA-256."""
    return path_of(sha256_of(source, layouts_dir(models_dir)), models_dir, recipe)


def path_of(sha256: str, models_dir: Path, recipe: str) -> Path:
    """The same, of the file with these bytes."""
    name = hashlib.sha256(f"{sha256} {recipe} {_EDITION}".encode()).hexdigest()[:32]
    return layouts_dir(models_dir) / f"{name}.gguf"


def converted(source: Path, models_dir: Path, recipe: str, *, libllama: str | None, say: Say) -> Path:
    """The converted file, made if it isn't there. May take long. Raises ConfigError."""
    target = converted_path(source, models_dir, recipe)
    if target.is_file():
        return target
    with _usable(target.parent):
        gate = target.with_suffix(".lock").open("w")
    with gate as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _clear(target)
            say(f"layout {recipe}: converting {source.name} once")
            _run(
                [str(source), str(target), recipe, sha256_of(source, target.parent), *([libllama] if libllama else [])],
                lambda line: say(f"layout {recipe}: {line}"),
            )
            if not target.is_file():
                raise ConfigError(f"engine.layout: {source} could not be converted: its process left no file")
            say(f"layout {recipe}: {target.stat().st_size / 1e6:.0f} MB in {target}")
    return target


def _clear(target: Path) -> None:
    """What a process that was killed left: for the holder of the lock."""
    for left in target.parent.glob(f"{target.stem}.*.part"):
        left.unlink(missing_ok=True)


def discard(source: Path, models_dir: Path, recipe: str) -> None:
    """Delete the converted copy, or what there is of it, where nobody runs on it or makes it."""
    delete_unused(converted_path(source, models_dir, recipe))


def delete_unused(target: Path) -> bool:
    """The same, of this copy; False where somebody does, or it can't be deleted."""
    if not any(target.parent.glob(f"{target.stem}.*")):
        return True
    use, gate = target.with_suffix(".use"), target.with_suffix(".lock")
    with contextlib.suppress(OSError), use.open("ab") as used, gate.open("ab") as made:
        for lock in (used, made):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody does
        _clear(target)
        target.unlink(missing_ok=True)
        offsets_path(target).unlink(missing_ok=True)
        return True
    return False


def is_used(target: Path) -> bool:
    """Whether some process runs on this copy."""
    with contextlib.suppress(OSError), target.with_suffix(".use").open("rb") as used:
        try:
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _run(words: list[str], say: Say) -> None:
    """The child, to its end; its words on stderr are the error. Raises ConfigError."""
    child = subprocess.Popen(  # noqa: S603 (our own module)
        [sys.executable, "-m", "hitsend.serve.engine.convert", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        for line in child.stdout:
            say(line.strip())
        said = child.stderr.read().strip().splitlines()
    if child.returncode != 0:
        why = said[-1] if said else f"its process ended with {child.returncode}"
        kind = NoRoom if child.returncode == NO_ROOM else ConfigError
        raise kind(why if why.startswith("engine.") else f"engine.layout: {words[0]} can't be converted: {why}")


def sha256_of(file: Path, folder: Path) -> str:
    """The file's SHA-256; what was read once is remembered in `folder` while size and time of the file stay. Raises
    ConfigError."""
    with _usable(folder):
        return _sha256_of(file, folder)


def _sha256_of(file: Path, folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    mark, known = mark_of(file), known_files(folder)
    if mark not in known:
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
        known[mark] = digest.hexdigest()
        with contextlib.suppress(OSError):  # a full disk: then it is read again the next time
            know_files(folder, known)
    return known[mark]


def mark_of(file: Path) -> str:
    """What tells whether a file is as it was: its place, its size, its time."""
    stat = file.stat()
    return f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def known_files(folder: Path) -> dict[str, str]:
    """SHA-256 by mark, of what was read before."""
    try:
        known = dict(json.loads((folder / _KNOWN).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    return {mark: sha256 for mark, sha256 in known.items() if isinstance(sha256, str)}


def know_files(folder: Path, known: dict[str, str]) -> None:
    """Remember them, all at once. Raises OSError."""
    part = folder / f"{_KNOWN}.{os.getpid()}-{threading.get_ident()}.part"
    try:
        part.write_text(json.dumps(known), encoding="utf-8")
        part.replace(folder / _KNOWN)
    finally:
        part.unlink(missing_ok=True)
