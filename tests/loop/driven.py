"""A loop on the fake decoder, with everything it reported kept and checked."""

from collections import Counter, defaultdict

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.messages import Done, Pulse, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop
from hitsend.testing import FakeClock, FakeDecoder


def submit(request_id, num_prompt_tokens=5, *, seeds=(1,), max_tokens=8, deadline_s=60.0, tier=0, **sampling):
    prompt = tuple(
        1 + (hash((request_id, i)) if isinstance(request_id, int) else i) % 60 for i in range(num_prompt_tokens)
    )
    return Submit(str(request_id), prompt, SamplingParams(**sampling), seeds, max_tokens, deadline_s, tier)


class Driven:
    """Steps a loop and keeps what it said. Never-ending by default: the fake's end token is not in its vocabulary."""

    def __init__(self, *, limits=None, end_token_ids=frozenset(), speculator=None, disk=None, **decoder):
        self.clock = FakeClock()
        self.decoder = FakeDecoder(clock=self.clock, end_token_ids=end_token_ids, **decoder)
        self.limits = limits or LoopLimits(step_tokens=16, reserve_tokens=4, max_waiting=64, check_every_step=True)
        self.loop = Loop(self.decoder, self.limits, self.clock, None, speculator, disk=disk)
        self.reports = []
        self.done: dict[tuple[str, int], Done] = {}
        self.sampled = defaultdict(list)
        self.prefilled = Counter()

    def handle(self, *commands):
        for command in commands:
            self.loop.handle(command)

    def step(self):
        """One pass through the model and whatever was due before it; returns the new reports."""
        new = []
        while self.loop.has_work and not any(isinstance(report, StepReport) for report in new):
            new += self._take(self.loop.step())
        return new

    def settle(self):
        """Take only what is due without computing: after this, nothing is in the outbox."""
        return self._take(self.loop.step())

    def run(self, limit=5000):
        for _ in range(limit):
            if not self.loop.has_work:
                return self
            self._take(self.loop.step())
        raise AssertionError(f"still working after {limit} steps")

    def tokens(self, request_id, choice=0):
        return [token.token_id for token in self.sampled[str(request_id), choice]]

    def of(self, kind):
        return [report for report in self.reports if isinstance(report, kind)]

    def check(self):
        """What must hold at any time."""
        pulse = self.loop.pulse()
        assert pulse.check is None
        assert pulse.cells_used <= self.decoder.num_cells
        assert self.decoder.cells_filled <= pulse.cells_used + pulse.cells_cached
        assert not [report for report in self.of(Pulse) if report.check]
        assert all(len(batch.token_ids) <= self.limits.step_tokens for batch in self.decoder.batches[-1:])

    def _take(self, reports):
        assert reports or not self.loop.has_work, "work, but nothing came of it"
        for report in reports:
            for done in [report] if isinstance(report, Done) else getattr(report, "done", ()):
                assert (done.request_id, done.choice) not in self.done, "ended twice"
                self.done[done.request_id, done.choice] = done
            for row in getattr(report, "rows", ()):
                self.sampled[row.request_id, row.choice] += row.sampled
                self.prefilled[row.request_id, row.choice] += row.prefill_tokens
        self.reports += reports
        self.check()
        return reports
