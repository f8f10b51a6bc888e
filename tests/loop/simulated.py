"""Traffic on a loop whose decoder only costs time: no wall clock, the same seed gives the same figures."""

import math
from itertools import pairwise

import numpy as np

from hitsend.core.request import SamplingParams
from hitsend.serve.loop.messages import Done, StepReport, Submit
from hitsend.serve.loop.roster import LoopLimits
from hitsend.serve.loop.step import Loop
from hitsend.testing import FakeClock, FakeDecoder

VOCAB = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
STEP_S, PREFILL_S, DECODE_S = 0.004, 0.0021, 0.0033
"""What a step, a prompt's token and a decoded token cost: as measured with the bundled model on two cores."""

REQUEST_S = PROMPT_TOKENS * PREFILL_S + OUTPUT_TOKENS * DECODE_S
"""What one request costs of the machine's time, when steps are full."""

SAMPLING = SamplingParams(temperature=0.0)
ROW = np.arange(VOCAB, dtype=np.float32)


class CostlyDecoder(FakeDecoder):
    """Each step takes as long as its tokens cost."""

    def decode(self, batch):
        decodes = int((np.bincount(batch.slots)[batch.slots] == 1).sum())
        self.clock.advance(STEP_S + DECODE_S * decodes + PREFILL_S * (len(batch.slots) - decodes))
        self.batches.clear()
        return super().decode(batch)


def poisson(rng, tenant, per_s, seconds, *, name, prompt_tokens=PROMPT_TOKENS, tier=1, deadline_s=60.0):
    """Requests of one tenant at random instants: (instant, submit)."""
    arrivals, at = [], rng.expovariate(per_s)
    while at < seconds:
        prompt = tuple(rng.randrange(1, VOCAB) for _ in range(max(1, round(prompt_tokens * rng.uniform(0.5, 1.5)))))
        output = max(1, round(OUTPUT_TOKENS * rng.uniform(0.5, 1.5)))
        request_id = f"{name}-{len(arrivals)}"
        arrivals.append((at, Submit(request_id, prompt, SAMPLING, (1,), output, deadline_s, tier, tenant)))
        at += rng.expovariate(per_s)
    return arrivals


class Simulated:
    """What became of the arrivals: `ttft_s` and `done`, and `ended_s` after arrival, by request id.

    `told_at` has the instants of each one's tokens.
    """

    def __init__(self, arrivals, *, num_slots=32, cells_per_slot=512, limits=None, until_s=math.inf, decoder=None):
        self.clock = FakeClock(now=0.0)
        decoder = (decoder or CostlyDecoder)(
            vocab_size=VOCAB,
            num_slots=num_slots,
            cells_per_slot=cells_per_slot,
            end_token_ids=frozenset(),
            logits_of=lambda tokens: ROW.copy(),
            clock=self.clock,
            step_s=0.0,
        )
        self.loop = Loop(decoder, limits or LoopLimits(), self.clock)
        self.arrived = {submit.request_id: at for at, submit in arrivals}
        self.ttft_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.told_at: dict[str, list[float]] = {}
        self.done: dict[str, Done] = {}
        self.refused_s: dict[str, float] = {}
        self._run(sorted(arrivals, key=lambda arrival: arrival[0]), until_s)

    def of(self, prefix):
        """TTFT of those that got a token, sorted, in seconds."""
        return sorted(s for request_id, s in self.ttft_s.items() if request_id.startswith(prefix))

    def gaps_s(self, prefix):
        """Times between two tokens of one request, sorted."""
        told = [told_at for request_id, told_at in self.told_at.items() if request_id.startswith(prefix)]
        return sorted(later - at for told_at in told for at, later in pairwise(told_at))

    def codes(self, prefix):
        return [done.code for request_id, done in self.done.items() if request_id.startswith(prefix) and done.code]

    def _run(self, arrivals, until_s):
        waiting = iter(arrivals)
        coming = next(waiting, None)
        while self.clock.now() < until_s:
            while coming is not None and coming[0] <= self.clock.now():
                self.loop.handle(coming[1])
                coming = next(waiting, None)
            if self.loop.has_work:
                for report in self.loop.step():
                    self._take(report)
            elif coming is None:
                return
            else:
                self.clock.advance(coming[0] - self.clock.now())

    def _take(self, report):
        if isinstance(report, Done):
            self._ended(report)
        if isinstance(report, StepReport):
            for row in report.rows:
                self.told_at.setdefault(row.request_id, []).extend(report.ended_at for _ in row.sampled)
                if row.sampled and row.request_id not in self.ttft_s:
                    self.ttft_s[row.request_id] = report.ended_at - self.arrived[row.request_id]
            for done in report.done:
                self._ended(done)

    def _ended(self, done):
        self.done[done.request_id] = done
        self.ended_s[done.request_id] = done.at - self.arrived[done.request_id]


def percentile(values, share):
    """Nearest rank of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
