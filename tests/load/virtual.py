"""An event loop whose clock jumps to whatever is due next: hours pass in milliseconds, and always the same way."""

import asyncio
import selectors
from array import array

from hitsend.load.sample import Sample


class _Selector(selectors.SelectSelector):
    loop = None

    def select(self, timeout=None):
        found = super().select(0)
        assert found or timeout is not None, "nothing will ever happen"
        if not found and timeout:
            self.loop.now_s += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self):
        selector = _Selector()
        super().__init__(selector)
        selector.loop = self
        self.now_s = 0.0

    def time(self):
        return self.now_s


def virtually(work):
    """Run `work(loop)`, a coroutine function, to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work(runner.get_loop()))


def sample(outcome="ok", *, at=0.0, sent=None, arrivals=(1.0, 1.1, 1.2), done=None, **fields):
    """A sample whose pieces came at these instants."""
    sent = at if sent is None else sent
    done = (arrivals[-1] if arrivals else sent) if done is None else done
    return Sample(outcome, at, sent, done, array("d", arrivals), **fields)
