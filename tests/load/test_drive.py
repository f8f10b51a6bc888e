"""Both loops on a clock that is only counted: what a stalling server looks like, and to whom."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hitsend.load.arrivals import arrivals
from hitsend.load.drive import Stage
from hitsend.load.workload import Ask
from tests.load.virtual import sample, virtually

SERVICE_S, STALL_S, STALLS_AT = 0.01, 10.0, 30


class Server:
    """Serves one at a time in 10 ms, but for one request that takes ten seconds."""

    def __init__(self, loop):
        self.loop = loop
        self.free_s = 0.0
        self.served = 0
        self.open = 0
        self.most_open = 0

    async def send(self, ask, intended_s, number):
        sent = self.loop.time()
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self.served += 1
        takes = STALL_S if self.served == STALLS_AT else SERVICE_S
        self.free_s = max(self.free_s, sent) + takes
        try:
            await asyncio.sleep(self.free_s - sent)
        finally:
            self.open -= 1
        return sample(at=intended_s, sent=sent, arrivals=(self.loop.time(),), number=number, turn=ask.turn)


class Once:
    """A conversation of `turns` turns."""

    def __init__(self, turns=1):
        self.left = turns
        self.answers = []

    def ask(self, answer=None):
        self.answers.append(answer)
        if not self.left:
            return None
        self.left -= 1
        return Ask({}, None, None, turn=len(self.answers))


def stage(loop, send, start=lambda number: Once()):
    made = Stage(send, start, now=loop.time)
    made.begin()
    return made


def slow(samples, ms=1000):
    return sum(one.e2e_ms > ms for one in samples)


def test_an_open_loop_counts_what_a_stall_would_have_hidden():
    async def work(loop):
        server = Server(loop)
        made = stage(loop, server.send)
        await made.open(arrivals("constant", 10.0, duration_s=20.0, requests=None, seed=1))
        return made.samples

    samples = virtually(work)
    assert len(samples) == 200
    # request k was due at k/10; the 30th blocks from 2.9 s to 12.9 s: each one due in that time waits for its end
    expected, free = [], 0.0
    for number in range(200):
        free = max(free, number / 10) + (STALL_S if number + 1 == STALLS_AT else SERVICE_S)
        expected.append((free - number / 10) * 1000)
    measured = [one.e2e_ms for one in sorted(samples, key=lambda one: one.intended_s)]
    assert measured == pytest.approx(expected)
    assert slow(samples) == slow_by_hand(expected) > 90


def slow_by_hand(expected):
    return sum(ms > 1000 for ms in expected)


def test_a_closed_loop_of_one_sees_the_same_stall_once():
    """Which is why the two are not the same measurement."""

    async def work(loop):
        made = stage(loop, Server(loop).send)
        await made.closed(1, requests=200, duration_s=None)
        return made.samples

    assert slow(virtually(work)) == 1


def test_what_the_client_itself_is_late_counts_too():
    async def work(loop):
        async def send(ask, intended_s, number):
            sent = loop.time()
            if number == 0:
                loop.now_s += 5.0  # this process was stopped for five seconds
            return sample(at=intended_s, sent=sent, arrivals=(loop.time(),), number=number)

        made = stage(loop, send)
        await made.open([0.0, 1.0, 2.0, 7.0])
        return sorted(made.samples, key=lambda one: one.intended_s)

    samples = virtually(work)
    assert [one.e2e_ms for one in samples] == pytest.approx([5000, 4000, 3000, 0])
    assert [one.e2e_sent_ms for one in samples] == pytest.approx([5000, 0, 0, 0])


@settings(max_examples=40)
@given(
    st.integers(1, 12),
    st.one_of(st.none(), st.integers(1, 60)),
    st.one_of(st.none(), st.floats(0.05, 3.0)),
    st.integers(1, 4),
)
def test_a_closed_loop_keeps_its_width_and_its_bounds(concurrency, requests, duration_s, turns):
    requests = 5 if requests is None and duration_s is None else requests

    async def work(loop):
        server = Server(loop)
        made = stage(loop, server.send, lambda number: Once(turns))
        await made.closed(concurrency, requests=requests, duration_s=duration_s)
        return made, server

    made, server = virtually(work)
    assert server.most_open <= concurrency
    assert made.num_open == 0
    assert len(made.samples) == made.num_asked == server.served
    assert requests is None or made.num_asked <= requests
    assert duration_s is None or all(one.sent_s <= duration_s for one in made.samples)
    if duration_s is None:
        assert made.num_asked == requests


def test_a_chat_goes_on_with_its_answer_and_ends_with_an_error():
    talks = []

    async def work(loop):
        async def send(ask, intended_s, number):
            outcome = "error" if number == 2 else "ok"
            return sample(outcome, at=intended_s, number=number, content=f"answer {number}", turn=ask.turn)

        def start(number):
            talks.append(Once(5))
            return talks[-1]

        made = stage(loop, send, start)
        await made.closed(1, requests=5, duration_s=None)
        return made.samples

    assert [one.turn for one in virtually(work)] == [1, 2, 3, 1, 2]
    assert talks[0].answers == [None, "answer 0", "answer 1"]
    assert talks[1].answers == [None, "answer 3"]


def test_turns_of_an_open_loop_are_due_when_their_answer_and_the_pause_are_over():
    async def work(loop):
        async def send(ask, intended_s, number):
            sent = loop.time()
            await asyncio.sleep(0.5)
            return sample(at=intended_s, sent=sent, arrivals=(loop.time(),), number=number, turn=ask.turn)

        made = stage(loop, send, lambda number: Once(3))
        await made.open([0.0], think_s=2.0)
        return made.samples

    assert [(one.intended_s, one.sent_s) for one in virtually(work)] == [(0.0, 0.0), (2.5, 2.5), (5.0, 5.0)]


def test_too_many_open_requests_are_said_not_waited_for():
    async def work(loop):
        async def send(ask, intended_s, number):
            await asyncio.sleep(10)
            return sample(at=intended_s, number=number)

        made = Stage(send, lambda number: Once(), now=loop.time, most_open=3)
        made.begin()
        await made.open([0.1 * number for number in range(5)])
        return made.samples

    samples = virtually(work)
    assert [one.error for one in samples if one.outcome == "error"] == ["client_limit"] * 2
    assert len(samples) == 5


def test_what_was_measured_before_an_interruption_is_there():
    async def work(loop):
        made = stage(loop, Server(loop).send)
        task = asyncio.create_task(made.closed(2, requests=None, duration_s=1000))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return made

    made = virtually(work)
    assert made.num_open == 0
    assert [one.outcome for one in made.samples].count("interrupted") == 2
    assert [one.outcome for one in made.samples].count("ok") == STALLS_AT - 1
    assert made.wall_s == pytest.approx(1.0)
