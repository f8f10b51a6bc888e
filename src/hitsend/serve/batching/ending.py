"""How a batch ends: its answers become an output file and an error file.

Enters: a batch of which no line runs or will begin. Leaves: two files in their places, and the batch's last status.
Always true: files are whole and on the disk before the row that names them; an end that was begun and not finished is
begun anew, and what it left is swept up. Next: `../usage/files.py`.
"""

import asyncio
import os
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from hitsend.core.errors import NotFound, StorageFailed
from hitsend.serve.batching.input import Limits, lines, parse
from hitsend.serve.usage.batches import Batch, BatchStore, Files
from hitsend.serve.usage.files import FileStore, StoredFile

OUTPUT = "batch_output"
_LINE_ENDS = "\x85\u2028\u2029"
"""That JSON leaves as they are; all others it escapes anyway."""
EXPIRED = {"code": "batch_expired", "message": "the batch's completion window was over before this line began"}


def answer_line(batch_id: str, number: int, custom_id: str, response: dict[str, object] | None, error: object) -> bytes:
    """One line of an output or error file; also to `splitlines`, which ends lines at more than `\\n`."""
    line = msgspec.json.encode(
        {"id": f"batch_req_{batch_id[6:]}_{number}", "custom_id": custom_id, "response": response, "error": error}
    )
    for char in _LINE_ENDS:
        if (written := char.encode()) in line:
            line = line.replace(written, f"\\u{ord(char):04x}".encode())
    return line


class Ending:
    """Writes the files of batches that are over."""

    def __init__(self, files: FileStore, batches: BatchStore, limits: Limits) -> None:
        self._files = files
        self._batches = batches
        self._limits = limits

    async def end(self, batch: Batch, status: str) -> None:
        """Write and say so, again if a line came in meanwhile. Raises StorageFailed, OSError."""
        for _ in range(5):
            made: list[str] = []
            files = await self._write(batch, made, with_rest=status == "expired")
            if await self._batches.end(batch.batch_id, status, files):
                return
            for file_id in made:
                self._files.discard(file_id)
        raise StorageFailed("the batch's end could not be written")

    async def _write(self, batch: Batch, made: list[str], *, with_rest: bool) -> Files:
        output, num_good = await self._file(batch, made, "output", is_failed=False)
        rest: list[int] = []
        if with_rest:
            done = await self._batches.done(batch.batch_id)
            rest = await asyncio.to_thread(lambda: [number for number, _ in self._others(batch, done)])
        errors, num_bad = await self._file(batch, made, "error", is_failed=True, rest=frozenset(rest))
        return Files(output, errors, (num_good, num_bad), num_bad + len(rest))

    async def _file(
        self, batch: Batch, made: list[str], name: str, *, is_failed: bool, rest: frozenset[int] = frozenset()
    ) -> tuple[StoredFile | None, int]:
        file_id, opened = self._files.create()
        made.append(file_id)
        num, after = 0, 0
        with opened:
            while page := await self._batches.answers(batch.batch_id, after, is_failed=is_failed):
                await asyncio.to_thread(_append, opened, [packed for _, packed in page])
                num, after = num + len(page), page[-1][0]
            if rest:
                await asyncio.to_thread(self._append_rest, opened, batch, rest)
            num_bytes = await asyncio.to_thread(_settle, opened)
        if not num_bytes:
            self._files.discard(file_id)
            made.remove(file_id)
            return None, 0
        file_name = f"{batch.batch_id}_{name}.jsonl"
        return self._files.new_row(file_id, batch.key_id, OUTPUT, file_name, num_bytes), num

    def _append_rest(self, opened: BinaryIO, batch: Batch, rest: frozenset[int]) -> None:
        for number, custom_id in self._others(batch, frozenset()):
            if number in rest:
                opened.write(answer_line(batch.batch_id, number, custom_id, None, EXPIRED) + b"\n")

    def _others(self, batch: Batch, done: frozenset[int]) -> Iterator[tuple[int, str]]:
        """Lines that aren't among these; none where the file is gone or was never looked at."""
        if batch.in_progress_at is None:
            return
        try:
            path = self._files.path(batch.input_file_id)
            opened = path.open("rb")
        except (OSError, NotFound):
            return
        with opened:
            for number, raw in lines(opened, self._limits.max_line_bytes):
                if raw and number not in done:
                    yield number, parse(raw).custom_id


def _append(opened: BinaryIO, page: list[bytes]) -> None:
    opened.writelines(zlib.decompress(packed) + b"\n" for packed in page)


def _settle(opened: BinaryIO) -> int:
    opened.flush()
    os.fsync(opened.fileno())
    return opened.tell()
