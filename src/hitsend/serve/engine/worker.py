"""The engine's child process: load a model, then alternate between the edge's commands and the loop's steps.

    python -m hitsend.serve.engine.worker NAME --fd N

Enters: one `WorkerConfig`, then commands. Leaves: `Ready` or `LoadFailed`, then reports, those of one step in one
write. Always true: the model file is parsed here and nowhere near the edge; a `Pulse` goes out at least once a second
while the process is healthy (between the calls of a long step too), and never when a step hangs; the process ends
with the edge, dumps no core and leaves Ctrl-C and SIGTERM to the edge. Next: `loading.py`.
"""

import gc
import math
import os
import resource
import signal
import sys

import msgspec

from hitsend.core.clock import Clock, SystemClock
from hitsend.core.errors import ConfigError
from hitsend.serve.engine.grammar import Compiler
from hitsend.serve.engine.grammar_gate import LOOK_S, GrammarGate
from hitsend.serve.engine.libllama import die_with_parent, keep_freed_memory
from hitsend.serve.engine.loading import limits_of, load
from hitsend.serve.engine.speculating import speculator_for
from hitsend.serve.engine.spill import spill_folder
from hitsend.serve.engine.startup import LoadFailed, WorkerConfig, command_decoder, config_decoder, encode
from hitsend.serve.loop.decoder import DecoderFailed
from hitsend.serve.loop.messages import Done, Ready, Report, Shutdown
from hitsend.serve.loop.step import Loop
from hitsend.serve.parent import ParentLine

PULSE_S = 1.0
MAX_UNSENT_BYTES = 8 * 1024 * 1024
"""While the edge is so far behind, no step is run: it would only make more."""

FATAL = 4
"""Exit code after a failure of the decoder that the process can't survive."""

_DRAIN_S = 2.0


def main(arguments: list[str]) -> int:
    """Run until the edge says so or is gone; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    line = ParentLine(int(arguments[arguments.index("--fd") + 1]))
    config = _first_message(line)
    if config is None:
        return 0
    clock = SystemClock()
    try:
        decoder, facts, compiler = load(config, clock)
        speculator, facts = speculator_for(decoder, facts, config.settings, clock)
        disk = spill_folder(config.settings, facts)
    except ConfigError as failure:
        line.send(encode(LoadFailed(str(failure))))
        line.drain(_DRAIN_S)
        return 1
    loop = Loop(
        decoder,
        limits_of(config.settings, has_blas=decoder.model.library.has_blas),
        clock,
        compiler,
        speculator,
        disk=disk,
    )
    driver = Driver(line, loop, clock, compiler)
    decoder.on_progress = driver.prove_progress
    line.send(encode(Ready(os.getpid(), facts)))
    gc.collect()
    gc.freeze()
    keep_freed_memory()  # not before: what loading takes and frees is more than any step does
    try:
        driver.run()
    except DecoderFailed as failure:
        print(f"the decoder failed: {failure}", file=sys.stderr)  # noqa: T201 (the edge keeps stderr's last lines)
        return FATAL
    finally:
        if disk is not None:
            disk.close()
    line.drain(_DRAIN_S)
    return 0


class Driver:
    """Commands in, steps, reports out. Never waits longer than a pulse's interval."""

    def __init__(self, line: ParentLine, loop: Loop, clock: Clock, compiler: Compiler) -> None:
        self._line = line
        self._loop = loop
        self._gate = GrammarGate(compiler, loop.handle)
        self._clock = clock
        self._pulse_at = -math.inf

    def run(self) -> None:
        """Return after `Shutdown` or when the edge is gone. Raises DecoderFailed where that is fatal."""
        while not self._line.is_closed:
            is_busy = self._loop.has_work and self._line.unsent_bytes < MAX_UNSENT_BYTES
            pause_s = 0.0 if is_busy else max(0.0, self._pulse_at + PULSE_S - self._clock.now())
            is_last = self._take(self._line.receive(pause_s if self._gate.is_empty else min(pause_s, LOOK_S)))
            self._gate.let_pass()
            if self._loop.has_work and (is_last or self._line.unsent_bytes < MAX_UNSENT_BYTES):
                self._send(self._loop.step())
            elif self._clock.now() >= self._pulse_at + PULSE_S:
                self._send([])
            if is_last:
                return

    def prove_progress(self) -> None:
        """Called by the decoder in the middle of a long step: sends a pulse if one is due."""
        if self._clock.now() >= self._pulse_at + PULSE_S:
            # The books are between two states here, so what their check says means nothing.
            self._pulse_at = self._clock.now()
            self._line.send(encode(msgspec.structs.replace(self._loop.pulse(), check=None)))

    def _take(self, bodies: list[bytes]) -> bool:
        """Apply commands; True after `Shutdown`."""
        for body in bodies:
            command = command_decoder.decode(body)
            self._gate.handle(command)
            if isinstance(command, Shutdown):
                return True
        return False

    def _send(self, reports: list[Report]) -> None:
        now = self._clock.now()
        is_change_at_rest = not self._loop.has_work or any(isinstance(report, Done) for report in reports)
        if is_change_at_rest or now >= self._pulse_at + PULSE_S:
            # In front: whoever reads that a choice is done must already see the pool without it.
            self._pulse_at = now
            reports = [self._loop.pulse(), *reports]
        self._line.send_all(encode(report) for report in reports)


def _first_message(line: ParentLine) -> WorkerConfig | None:
    while not line.is_closed:
        for body in line.receive(PULSE_S):
            return config_decoder.decode(body)
    return None


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: the library's own destructors may log into a Python that is already gone.
    os._exit(exit_code)
