"""What the engine's child last said about itself.

Enters: pulses and steps. Leaves: figures. Always true: each pulse replaces all that pulses tell; what is wrong with the
prefix cache's disk goes to the log once. Next: `embedded.py`.
"""

import logging

import msgspec

from hitsend.serve.engine.keeper import EngineLine
from hitsend.serve.engine.protocol import EngineState
from hitsend.serve.loop.messages import Pulse, StepReport

_log = logging.getLogger(__name__)


class Told(msgspec.Struct):
    """Counts of choices, cells, slots and bytes. `step_ended_at`: of the last step, while something runs."""

    running: int = 0
    waiting: int = 0
    cells_used: int = 0
    slots_used: int = 0
    paused: int = 0
    preemptions_total: int = 0
    check: str | None = None
    cells_cached: int = 0
    cache_bytes: int = 0
    cache_disk_bytes: int = 0
    cache_disk_problem: str | None = None
    step_ended_at: float | None = None

    def state(self, line: EngineLine, num_slots: int, now: float) -> EngineState:
        """With what the line knows of its child; `num_slots` until that has loaded its model."""
        facts = line.facts
        return EngineState(
            is_ready=line.is_ready,
            pid=line.pid,
            restarts=line.restarts,
            running=self.running,
            waiting=self.waiting,
            cells_total=facts.num_cells if facts is not None else 0,
            cells_used=self.cells_used,
            slots_total=facts.num_slots if facts is not None else num_slots,
            slots_used=self.slots_used,
            preemptions_total=self.preemptions_total,
            progress_age_s=max(0.0, now - line.progress_at),
            check=self.check,
            paused=self.paused,
            num_threads=facts.num_threads if facts is not None else 0,
            cells_cached=self.cells_cached,
            cache_bytes=self.cache_bytes,
            cache_disk_bytes=self.cache_disk_bytes,
        )

    def pulsed(self, pulse: Pulse) -> None:
        """A pulse came."""
        self.running, self.waiting = pulse.num_running, pulse.num_waiting
        self.cells_used, self.slots_used = pulse.cells_used, pulse.slots_used
        self.preemptions_total, self.check = pulse.preemptions_total, pulse.check
        self.paused = pulse.num_paused
        self.cells_cached, self.cache_bytes = pulse.cells_cached, pulse.cache_bytes
        self.cache_disk_bytes = pulse.cache_disk_bytes
        if pulse.cache_disk_problem != self.cache_disk_problem:
            _log.warning("engine.prefix_cache_dir: %s", pulse.cache_disk_problem)
            self.cache_disk_problem = pulse.cache_disk_problem

    def stepped(self, report: StepReport) -> None:
        """A step ended."""
        self.running, self.waiting = report.num_running, report.num_waiting
        self.cells_used, self.slots_used = report.cells_used, report.num_running
