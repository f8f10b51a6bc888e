"""Files of saved prefixes: what is there comes back whole, and whatever is wrong with a file is a miss."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hitsend.core.errors import ConfigError
from hitsend.serve.engine.spill import PENDING_BYTES, SHORT_BYTES, SpillFolder
from tests.limited import no_file_may_grow
from tests.served import until

TOKENS = np.arange(100, dtype=np.int32)
SAVED = np.random.Generator(np.random.PCG64(1)).integers(0, 256, 3_000_000, np.uint8)


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFolder]:
    made = SpillFolder(tmp_path / "cache", b"model")
    yield made
    made.close()


def files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("cache/spill-*/*") if each.name != "lock")


def put(spill: SpillFolder, folder: Path, number_there: int = 1) -> tuple[int, Path]:
    """Written, not only taken."""
    number = spill.put("salt", TOKENS, SAVED)
    until(lambda: spill._files[number].saved, lambda saved: saved is None)
    found = files(folder)
    assert len(found) == number_there
    return number, max(found, key=lambda each: each.stat().st_mtime_ns)


def test_what_was_put_comes_back_and_leaves_nothing_behind(spill: SpillFolder, tmp_path: Path) -> None:
    number, path = put(spill, tmp_path)
    found = spill.get(number, "salt", TOKENS)
    assert found is not None
    assert np.array_equal(found, SAVED)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, path.parent, tmp_path / "cache")] == [
        0o600,
        0o700,
        0o700,
    ]
    assert (len(path.name), path.suffix) == (32, ""), "a name tells nothing"
    spill.drop(number)
    assert spill.get(number, "salt", TOKENS) is None
    assert until(lambda: files(tmp_path), lambda there: not there) == []
    spill.put("salt", TOKENS, SAVED)
    spill.close()
    assert list((tmp_path / "cache").glob("spill-*")) == []


LONG = np.resize(SAVED, SHORT_BYTES + 1)


def long_file(spill: SpillFolder, folder: Path) -> tuple[int, Path]:
    number = spill.put("salt", TOKENS, LONG)
    until(lambda: spill._files[number].saved, lambda saved: saved is None)
    return number, max(files(folder), key=lambda each: each.stat().st_mtime_ns)


def test_a_long_file_is_read_before_it_is_asked_for(spill: SpillFolder, tmp_path: Path) -> None:
    number, path = long_file(spill, tmp_path)
    spill.fetch(number)
    assert until(lambda: spill.fetch(number), bool)
    path.unlink()
    found = spill.get(number, "salt", TOKENS)
    assert found is not None, "it was there already"
    assert np.array_equal(found, LONG)
    assert spill.get(number, "salt", TOKENS) is None, "and is given once"
    short, _ = put(spill, tmp_path)
    assert spill.fetch(short)
    assert spill.fetch(99)


def test_whoever_gets_it_while_it_is_read_waits_for_it(spill: SpillFolder, tmp_path: Path) -> None:
    number, _ = long_file(spill, tmp_path)
    assert not spill.fetch(number)
    found = spill.get(number, "salt", TOKENS)
    assert found is not None
    assert np.array_equal(found, LONG)


def test_a_long_file_that_was_changed_is_a_miss_too(spill: SpillFolder, tmp_path: Path) -> None:
    number, path = long_file(spill, tmp_path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert not spill.fetch(number)
    assert until(lambda: spill.fetch(number), bool)
    assert spill.get(number, "salt", TOKENS) is None


def test_what_was_read_for_somebody_who_left_is_bounded(spill: SpillFolder, tmp_path: Path) -> None:
    spill.pending_bytes = 2 * LONG.nbytes
    numbers = [long_file(spill, tmp_path)[0] for _ in range(3)]
    for number in numbers[:2]:
        spill.fetch(number)
        assert until(lambda number=number: spill.fetch(number), bool)
    spill.fetch(numbers[2])  # the first two make way
    assert until(lambda: spill.fetch(numbers[2]), bool)
    assert spill._fetched == LONG.nbytes
    for number in numbers:
        spill.drop(number)
    assert spill._fetched == 0


def test_nobody_gets_what_was_put_for_somebody_else(spill: SpillFolder, tmp_path: Path) -> None:
    number, path = put(spill, tmp_path)
    assert spill.get(number, "other", TOKENS) is None
    assert spill.get(number, "salt", TOKENS[:-1]) is None
    other, second = put(spill, tmp_path, 2)
    second.write_bytes(path.read_bytes())
    assert spill.get(other, "salt", TOKENS) is not None, "the same thing for the same one"
    stranger = SpillFolder(tmp_path / "cache", b"model")
    theirs = stranger.put("salt", TOKENS, SAVED)
    until(lambda: stranger._files[theirs].saved, lambda saved: saved is None)
    stranger._files[theirs].path.replace(path)
    assert spill.get(number, "salt", TOKENS) is None, "another process's, for the same salt and tokens"
    stranger.close()


@pytest.mark.parametrize("at", [0, 10, 45, 60, 100, -1])
def test_one_changed_byte_is_a_miss(spill: SpillFolder, tmp_path: Path, at: int) -> None:
    number, path = put(spill, tmp_path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    assert spill.get(number, "salt", TOKENS) is None


@pytest.mark.parametrize("keep", [0, 79, 80, 1000, -1])
def test_a_file_that_is_cut_short_is_a_miss(spill: SpillFolder, tmp_path: Path, keep: int) -> None:
    number, path = put(spill, tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    assert spill.get(number, "salt", TOKENS) is None
    path.unlink()
    path.symlink_to("/dev/zero")
    assert spill.get(number, "salt", TOKENS) is None
    path.unlink()
    assert spill.get(number, "salt", TOKENS) is None


def test_a_full_disk_ends_writing_and_nothing_else(spill: SpillFolder, tmp_path: Path) -> None:
    first, _ = put(spill, tmp_path)
    with no_file_may_grow(1_000_000):
        second = spill.put("salt", TOKENS, SAVED)
        until(lambda: spill.problem, lambda problem: problem is not None)
    assert spill.problem is not None
    assert "no longer written" in spill.problem
    assert not spill.takes(1)
    assert len(files(tmp_path)) == 1, "no half file"
    assert spill.get(second, "salt", TOKENS) is None
    assert spill.get(first, "salt", TOKENS) is not None


def test_a_folder_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix_cache_dir"):
        SpillFolder(Path("/proc/no/such"), b"model")


def test_a_busy_disk_takes_no_more(spill: SpillFolder) -> None:
    assert spill.takes(2 * PENDING_BYTES), "one is always taken"
    with spill._ready:  # the writer can't go on
        number = spill.put("salt", TOKENS, SAVED)
        assert not spill.takes(PENDING_BYTES)
        assert spill.takes(PENDING_BYTES - SAVED.nbytes)
        assert spill.get(number, "salt", TOKENS) is SAVED


KILLED = """
import os, sys, time
from pathlib import Path
import numpy as np
from hitsend.serve.engine.spill import SpillFolder
spill = SpillFolder(Path(sys.argv[1]), b"model")
number = spill.put("salt", np.arange(9, dtype=np.int32), np.zeros(1000, np.uint8))
while spill._files[number].saved is not None:
    time.sleep(0.01)
print("there", flush=True)
sys.stdin.read()
"""


def test_files_of_a_killed_process_are_deleted_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path / "cache")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"there\n"
        SpillFolder(tmp_path / "cache", b"model").close()
        assert len(files(tmp_path)) == 1
        other.kill()
    SpillFolder(tmp_path / "cache", b"model").close()
    assert list((tmp_path / "cache").glob("spill-*")) == []
