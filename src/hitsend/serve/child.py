"""One child process behind a private socket pair: started, spoken to, watched and reaped.

Enters: the words after the interpreter's name, and two callbacks. Leaves: whole message bodies in order, then exactly
one `ChildExit`. Always true: everything the child wrote before it ended is delivered before its exit is reported, the
process is reaped and every descriptor closed by then, also where `start` failed or was cancelled; a descriptor has one
owner, so that none is closed under somebody who got its number; a child whose socket closed is killed if it lingers.
Next: `parent.py`, the same line seen from inside the child.

    child = Child(
        ["-m", "hitsend.serve.text_worker"],          # "--fd N" is appended
        on_message=lambda body: ...,                  # called in the event loop, one whole frame body at a time
        on_exit=lambda exit: ...,                     # called once, also after kill()
    )
    await child.start()
    child.send(msgspec.msgpack.encode(command))       # raises ChildGone when nobody will read it
    child.kill()                                      # SIGKILL; on_exit follows
    await child.stop(grace_s=5.0)                     # close the line, wait, kill what is left; safe to call twice

A `Child` is used once: to restart, make another. Callbacks must not block and must not raise, but for
msgspec.DecodeError: a child that says what is none of its messages is ended.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from hitsend.core.frames import FrameReader, FrameTooLong, frame

MAX_UNSENT_BYTES = 128 * 1024 * 1024
"""A child that leaves so much unread isn't reading any more."""

KEPT_LINES = 60
_LINE_CHARS = 400
_LINGER_S = 3.0
_BUFFER_BYTES = 1024 * 1024


class ChildGone(Exception):
    """The child has ended (or was never started), or has stopped reading."""


class ChildExit(msgspec.Struct, frozen=True):
    """How it ended: `status` is the exit code, or None when `signal` ended it. `lines` are its last words on stderr."""

    pid: int
    status: int | None
    signal: int | None
    lines: tuple[str, ...]

    @property
    def how(self) -> str:
        """For messages: `signal 9` or `exit code 3`."""
        return f"exit code {self.status}" if self.signal is None else f"signal {self.signal}"


class Line(asyncio.Protocol):
    """One end of a socket pair, in an event loop: whole message bodies in order, then one call when it closed."""

    def __init__(self, on_message: Callable[[bytes], None], on_closed: Callable[[], None]) -> None:
        self._reader = FrameReader()
        self._on_message = on_message
        self._on_closed = on_closed
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's."""
        try:
            bodies = self._reader.feed(data)
        except FrameTooLong:
            self._hang_up()
            return
        try:
            for body in bodies:
                self._on_message(body)
        except msgspec.DecodeError:
            self._hang_up()

    def connection_lost(self, _exc: Exception | None) -> None:
        """asyncio's."""
        self._on_closed()

    def _hang_up(self) -> None:
        """No resynchronising is possible: the closed line ends the child, which is then reported like any death."""
        if self._transport is not None:
            self._transport.close()


class _Words(asyncio.Protocol):
    """The child's stderr: only the last lines are kept."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.closed = asyncio.Event()
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4 * _LINE_CHARS :]
        for line in whole[-KEPT_LINES:]:
            self._keep(line)

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._rest:
            self._keep(self._rest)
        self.closed.set()

    def _keep(self, line: bytes) -> None:
        self.lines.append(line.decode("utf-8", "replace")[:_LINE_CHARS])


class Child:
    """See the module's docstring. All methods belong to the event loop's thread."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        on_message: Callable[[bytes], None],
        on_exit: Callable[[ChildExit], None],
        inherits: Sequence[int] = (),
        shows_stderr: bool = False,
    ) -> None:
        """`inherits`: descriptors that it gets beside its line. `shows_stderr`: it writes where we do, and `lines` stay
        empty."""
        self._arguments = tuple(arguments)
        self._inherits = tuple(inherits)
        self._shows_stderr = shows_stderr
        self._on_message = on_message
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._words: _Words | None = None
        self._line_closed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._exit: ChildExit | None = None

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._process.pid if self._process is not None and self._exit is None else None

    @property
    def is_running(self) -> bool:
        """Whether it was started and its line is still open."""
        return self._transport is not None and not self._line_closed.is_set()

    @property
    def exit(self) -> ChildExit | None:
        """How it ended, once it did."""
        return self._exit

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines of its stderr so far."""
        return tuple(self._words.lines) if self._words is not None else ()

    async def start(self) -> None:
        """Spawn the process (its own process group, so that Ctrl-C reaches only the edge). Raises OSError."""
        if self._process is not None:
            raise RuntimeError("a Child is used once: make another")
        (ours, theirs), (heard, said) = socket.socketpair(), socket.socketpair()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            # A spawn takes a few milliseconds; asyncio's own subprocesses would bring a watcher and a second exit path.
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603
                [sys.executable, *self._arguments, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if self._shows_stderr else said.fileno(),
                pass_fds=(theirs.fileno(), *self._inherits),
                process_group=0,
            )
        except BaseException:
            ours.close()
            heard.close()
            raise
        finally:
            theirs.close()
            said.close()
        connecting = asyncio.get_running_loop().create_task(self._connect(self._process, ours, heard))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # In the middle of it, socket and transport both believe that they own the descriptor, and the one that
            # closes it last closes what has the number by then.
            await asyncio.wait({connecting})
            raise

    async def _connect(self, process: "subprocess.Popen[bytes]", ours: socket.socket, heard: socket.socket) -> None:
        loop, words = asyncio.get_running_loop(), _Words()
        self._words = words
        try:
            await loop.create_unix_connection(lambda: words, sock=heard)
            self._transport, _ = await loop.create_unix_connection(
                lambda: Line(self._on_message, self._line_closed.set), sock=ours
            )
        except BaseException:
            _kill(process)
            self._line_closed.set()
            raise
        finally:
            self._watch = loop.create_task(self._await_exit(process, words), name=f"child {process.pid}")

    def send(self, body: bytes) -> None:
        """Hand one message body over; never blocks. Raises ChildGone, FrameTooLong."""
        if self._transport is None or self._line_closed.is_set() or self._transport.is_closing():
            raise ChildGone("the child process has ended")
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.kill()
            raise ChildGone("the child process has stopped reading")
        self._transport.write(frame(body))

    def kill(self) -> None:
        """SIGKILL its process group, if it still runs. Does not wait: `on_exit` tells."""
        if self._process is not None and self._exit is None:
            _kill(self._process)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Close the line (the child's sign to go), wait, kill what is left after `grace_s`; then `on_exit` has run."""
        if self._watch is None:
            return
        if self._transport is not None:
            self._transport.close()
        done, _ = await asyncio.wait({self._watch}, timeout=grace_s)
        if not done:
            self.kill()
            await asyncio.wait({self._watch})

    async def _await_exit(self, process: subprocess.Popen[bytes], words: _Words) -> None:
        """Wait for the line to close, which a death of the process always causes; then reap."""
        await self._line_closed.wait()
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + _LINGER_S, 0.001
        while process.poll() is None:
            if loop.time() > deadline:
                _kill(process)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)
        try:
            async with asyncio.timeout(1.0):
                await words.closed.wait()
        except TimeoutError:
            words.lines.append("(stderr is still held open by another process)")
        code = process.returncode
        self._exit = ChildExit(
            pid=process.pid,
            status=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            lines=tuple(words.lines),
        )
        self._on_exit(self._exit)


def _kill(process: subprocess.Popen[bytes]) -> None:
    # poll() first: a reaped pid may already belong to somebody else.
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
