"""Saved prefixes in files: the `Disk` of the engine's child.

A file is written by a thread, so that no step waits for a disk, and read by another (`fetch`), or by the step that uses
it where nobody else would be kept waiting or it is short. Nothing outlives the process: names are random, and what
vouches for a file is a key that only this process has. So no file of another process, model, build or tenant, none that
was cut short and none that was changed is ever restored: it is a miss.

    folder/spill-RANDOM/   0700; `lock` is held as long as its process lives; the next start deletes those of the dead
    file                   magic, hash of what it is for (model, KV type, salt, tokens), length, MAC over all; the bytes

Enters: bytes to put, numbers to get. Leaves: bytes, or None. Always true: at most `PENDING_BYTES`, or one entry, wait
to be written, and as many were read and not yet taken; the first failure of a write ends all writing, says so once
(`problem`), and changes nothing else; what is there can still be read. Next: `../loop/disk.py`.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import shutil
import struct
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ConfigError
from hitsend.serve.loop.messages import EngineFacts
from hitsend.settings import EngineSettings

PENDING_BYTES = 64 * 1024 * 1024
"""Of bytes that have left the books of host memory and aren't written yet."""

SHORT_BYTES = 4 * 1024 * 1024
"""Read and checked in a few milliseconds."""

_HEAD = struct.Struct("<8s32sQ32s")
_MAGIC = b"hitsend1"
_PIECE = 1024 * 1024
_NICE = 10
_PREFIX = "spill-"


class _File(msgspec.Struct):
    """One of them. `saved` until it is written; `is_dropped`: nobody wants it any more. `is_asked`: it is being read,
    or `is_read`, and `found` is what there was."""

    path: Path
    what: bytes
    num_bytes: int
    saved: NDArray[np.uint8] | None
    is_dropped: bool = False
    is_asked: bool = False
    is_read: bool = False
    found: NDArray[np.uint8] | None = None


class SpillFolder:
    """See the module's docstring. `put`, `fetch`, `get`, `drop` and `close` belong to one thread."""

    def __init__(self, folder: Path, model: bytes) -> None:
        """`model`: what the bytes are good for. Raises ConfigError where nothing can be written there."""
        self.problem: str | None = None
        self.pending_bytes = PENDING_BYTES
        self._secret = secrets.token_bytes(32)
        self._model = model
        self._files: dict[int, _File] = {}
        self._number = 0
        self._pending = self._fetched = 0
        self._work: deque[_File | None] = deque()
        self._to_read: deque[_File | None] = deque()
        self._ready = threading.Condition()
        try:
            self._folder, self._lock = _own_folder(folder)
        except OSError as failure:
            raise ConfigError(f"engine.prefix_cache_dir: can't use {folder}: {failure.strerror}") from failure
        self._writer = threading.Thread(target=self._write_all, name="spill", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="spill-read", daemon=True)
        self._writer.start()
        self._reader.start()

    def takes(self, num_bytes: int) -> bool:
        """Whether `put` would take so many bytes now: never, after a write has failed."""
        with self._ready:
            return self.problem is None and (not self._pending or self._pending + num_bytes <= self.pending_bytes)

    def put(self, salt: str, tokens: NDArray[np.int32], saved: NDArray[np.uint8]) -> int:
        """Have it written; returns its number."""
        self._number += 1
        file = _File(self._folder / secrets.token_hex(16), self._what(salt, tokens), saved.nbytes, saved)
        self._files[self._number] = file
        self._do(file, saved.nbytes)
        return self._number

    def fetch(self, number: int) -> bool:
        """Whether `get` has nothing to read, or little, or there is no room to read it before; else it is read now."""
        file = self._files.get(number)
        with self._ready:
            if file is None or file.saved is not None or file.is_read or file.num_bytes <= SHORT_BYTES:
                return True
            if file.is_asked:
                return False
            if self._fetched + file.num_bytes > self.pending_bytes:
                for other in self._files.values():  # whoever wanted it has gone
                    self._forget(other)
            if self._fetched and self._fetched + file.num_bytes > self.pending_bytes:
                return True
            file.is_asked = True
            self._fetched += file.num_bytes
            self._to_read.append(file)
            self._ready.notify_all()
        return False

    def get(self, number: int, salt: str, tokens: NDArray[np.int32]) -> NDArray[np.uint8] | None:
        """What was put, if it is all there and was put for this salt and these tokens."""
        file = self._files.get(number)
        if file is None or not hmac.compare_digest(file.what, self._what(salt, tokens)):
            return None
        with self._ready:
            self._ready.wait_for(lambda: file.is_read or not file.is_asked)
            is_done, saved = file.is_read, file.found if file.saved is None else file.saved
            self._forget(file)
        if is_done or saved is not None:
            return saved
        try:
            return self._read(file)
        except OSError:
            return None

    def drop(self, number: int) -> None:
        """Delete it, by and by."""
        file = self._files.pop(number, None)
        if file is None:
            return
        with self._ready:
            file.is_dropped = True
            self._forget(file)
        self._do(file, 0)

    def close(self) -> None:
        """Delete all of them. Safe to call twice."""
        self._do(None, 0)
        with self._ready:
            self._to_read.append(None)
            self._ready.notify_all()
        self._writer.join()
        self._reader.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()

    def _what(self, salt: str, tokens: NDArray[np.int32]) -> bytes:
        """A keyed hash of all that the bytes depend on, each part behind its length."""
        digest = hashlib.blake2b(digest_size=32, key=self._secret)
        for part in (self._model, salt.encode(), tokens.tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()

    def _mac(self, file: _File, saved: NDArray[np.uint8]) -> bytes:
        digest = hashlib.blake2b(file.what, digest_size=32, key=self._secret)
        digest.update(saved.nbytes.to_bytes(8, "little"))
        digest.update(saved.data)
        return digest.digest()

    def _read(self, file: _File) -> NDArray[np.uint8] | None:
        """Raises OSError."""
        descriptor = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as source:
            head = source.read(_HEAD.size)
            if len(head) != _HEAD.size:
                return None
            magic, what, size, mac = _HEAD.unpack(head)
            if magic != _MAGIC or what != file.what or os.fstat(descriptor).st_size != _HEAD.size + size:
                return None
            saved = np.empty(size, np.uint8)
            at = 0
            while at < size:
                count = source.readinto(saved.data[at:])
                if not count:
                    return None
                at += count
        return saved if hmac.compare_digest(mac, self._mac(file, saved)) else None

    def _forget(self, file: _File) -> None:
        """What was read of it, if it was. For the holder of the lock."""
        if file.is_read:
            self._fetched -= file.num_bytes
            file.is_asked = file.is_read = False
            file.found = None

    # The threads' side

    def _read_all(self) -> None:
        _be_nice()
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._to_read)
                file = self._to_read.popleft()
            if file is None:
                return
            found = None
            try:
                found = None if file.is_dropped else self._read(file)
            except (OSError, MemoryError):
                pass  # a miss
            finally:
                with self._ready:
                    file.found, file.is_read = found, True
                    if file.is_dropped:
                        self._forget(file)
                    self._ready.notify_all()

    def _do(self, file: _File | None, num_bytes: int) -> None:
        with self._ready:
            self._pending += num_bytes
            self._work.append(file)
            self._ready.notify_all()

    def _write_all(self) -> None:
        _be_nice()
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._work)
                file = self._work.popleft()
            if file is None:
                return
            self._write(file)

    def _write(self, file: _File) -> None:
        with self._ready:
            saved, is_dropped, may_write = file.saved, file.is_dropped, self.problem is None
        problem = None
        try:
            if is_dropped:
                file.path.unlink(missing_ok=True)
            elif saved is not None and may_write:
                self._write_file(file, saved)
        except OSError as failure:
            problem = f"saved prefixes are no longer written to disk: {failure.strerror}"
        with self._ready:
            if saved is not None:
                file.saved = None
                self._pending -= saved.nbytes
            if problem is not None and not is_dropped:
                self.problem = self.problem or problem

    def _write_file(self, file: _File, saved: NDArray[np.uint8]) -> None:
        """Under its name only when it is whole. Raises OSError."""
        part = file.path.with_suffix(".part")
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as target:
                target.write(_HEAD.pack(_MAGIC, file.what, saved.nbytes, self._mac(file, saved)))
                at, view = 0, saved.data
                while at < saved.nbytes:
                    at += target.write(view[at : at + _PIECE])
            part.rename(file.path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _be_nice() -> None:
    with contextlib.suppress(OSError):  # a wish: steps need the processor more
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def spill_folder(settings: EngineSettings, facts: EngineFacts) -> SpillFolder | None:
    """As the settings want it, which are judged. Raises ConfigError."""
    folder = settings.prefix_cache_dir
    if folder is None:
        return None
    return SpillFolder(Path(folder), msgspec.msgpack.encode(msgspec.structs.replace(facts, cache_secret="")))


def _own_folder(folder: Path) -> tuple[Path, BinaryIO]:
    """A new one and its lock, after those of processes that are gone were deleted. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / ".lock").open("ab") as gate:  # one process at a time: a folder without its lock held is a dead one's
        fcntl.flock(gate, fcntl.LOCK_EX)
        for old in folder.glob(f"{_PREFIX}*"):
            _sweep(old)
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
        lock = (own / "lock").open("ab")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return own, lock


def _sweep(old: Path) -> None:
    if old.is_symlink() or not old.is_dir():
        return
    with contextlib.suppress(OSError), (old / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        shutil.rmtree(old, ignore_errors=True)
