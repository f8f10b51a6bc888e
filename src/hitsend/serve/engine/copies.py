"""The converted copies that lie in MODELS_DIR/layouts, and which of them nobody can want any more.

Enters: a models folder. Leaves: `Copy`s; deleted files. Always true: a copy that some process runs on, or makes, is
not deleted; one is stale when what it was made from is gone or has other bytes now, which is found out by reading the
file, or when this version would make it differently. A start deletes only what an older state of its own file left
(another file may be on a disk that isn't there at the moment); the rest is for `hitsend models prune`. Next:
`layouts.py`.
"""

from pathlib import Path
from typing import Literal

import msgspec

from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.convert import RECIPES
from hitsend.serve.engine.layouts import (
    Say,
    delete_unused,
    is_used,
    know_files,
    known_files,
    layouts_dir,
    mark_of,
    path_of,
    sha256_of,
)
from hitsend.serve.engine.offsets import LAYOUT_KEY, SOURCE_KEY, offsets_path

State = Literal["current", "changed", "gone", "outdated"]


class Copy(msgspec.Struct, frozen=True):
    """One of them. `source` is the path of what it was made from, or all that is known of that. `state`: of that file;
    `outdated`: the copy itself can't be used by this version."""

    path: str
    source: str
    layout: str
    num_bytes: int
    state: State
    is_used: bool

    @property
    def is_stale(self) -> bool:
        """Whether nobody will ask for it."""
        return self.state != "current"


def discard_older(source: Path, models_dir: Path, say: Say) -> None:
    """Delete the copies of what this file was before it changed. Raises ConfigError where it can't be read."""
    folder = layouts_dir(models_dir)
    now = sha256_of(source, folder)
    known, mark = known_files(folder), mark_of(source)
    older = [each for each in known if _path_in(each) == str(source.resolve()) and each != mark]
    if not older:
        return
    gone = {known.pop(each) for each in older} - {now}
    wanted = {sha256 for each, sha256 in known.items() if _is_there(each)}
    targets = [path_of(sha256, models_dir, recipe) for sha256 in gone - wanted for recipe in RECIPES]
    there = [target for target in targets if target.is_file()]
    undeleted = [target for target in targets if not delete_unused(target)]
    if not undeleted:
        try:
            know_files(folder, known)
        except OSError as failure:
            say(f"layouts: {folder} can't be written: {failure.strerror}")
    freed = [target for target in there if not target.is_file()]
    if freed:
        say(f"layouts: {source.name} has changed: {len(freed)} converted copies of what it was are deleted")


def copies(models_dir: Path) -> list[Copy]:
    """All of them. Reads sources that may have changed, to be sure."""
    folder = layouts_dir(models_dir)
    files = sorted(file for file in folder.glob("*.gguf") if not file.name.endswith(".offsets.gguf"))
    return [_copy(file, models_dir) for file in files]


def prune(models_dir: Path, *, every: bool) -> list[tuple[Copy, bool]]:
    """Delete those that are stale, or all; and whether each of these is gone now."""
    chosen = [copy for copy in copies(models_dir) if every or copy.is_stale]
    return [(copy, not copy.is_used and delete_unused(Path(copy.path))) for copy in chosen]


def _copy(file: Path, models_dir: Path) -> Copy:
    beside = offsets_path(file)
    size = sum(each.stat().st_size for each in (file, beside) if each.is_file())
    try:
        keys = read_header(str(file)).metadata
    except ConfigError:  # not one of ours, or half of one
        return Copy(str(file), "", "", size, "outdated", is_used(file))
    sha256, layout = str(keys.get(SOURCE_KEY, "")), str(keys.get(LAYOUT_KEY, ""))
    source, state = _source_of(sha256, layouts_dir(models_dir))
    if file != path_of(sha256, models_dir, layout):
        state = "outdated"
    return Copy(str(file), source, layout, size, state, is_used(file))


def _source_of(sha256: str, folder: Path) -> tuple[str, State]:
    """Where a file with these bytes is, or was."""
    paths = {_path_in(mark) for mark, known in known_files(folder).items() if known == sha256}
    there = sorted(path for path in paths if Path(path).is_file())
    for path in there:
        if sha256_of(Path(path), folder) == sha256:
            return path, "current"
    return (there[0], "changed") if there else (min(paths, default=""), "gone")


def _path_in(mark: str) -> str:
    return mark.rsplit(" ", 2)[0]


def _is_there(mark: str) -> bool:
    """Whether the file is still as it was."""
    file = Path(_path_in(mark))
    return file.is_file() and mark_of(file) == mark
