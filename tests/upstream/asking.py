"""Asks an engine without an edge in front of it."""

from contextlib import asynccontextmanager

from hitsend.core.clock import SystemClock
from hitsend.core.errors import ServeError
from hitsend.core.request import Delta, Message, Request, SamplingParams
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.protocol import Job


class Answer:
    """What came of one job."""

    def __init__(self):
        self.text = self.reasoning = ""
        self.calls, self.reasons, self.events = [], [], []
        self.error = self.produced = None

    def take(self, event):
        if not isinstance(event, Delta):
            self.events.append(event)
            return
        self.text += event.text
        self.reasoning += event.reasoning
        self.calls += event.tool_calls
        self.reasons += [str(event.finish_reason)] if event.finish_reason else []


@asynccontextmanager
async def engine_of(settings, *, clock=None, key=None, salt=b"house"):
    engine = OpenAIEngine(settings, clock or SystemClock(), key=key, salt=salt)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def request_of(**fields):
    return Request("r", "near", fields.pop("messages", (Message("user", "hi"),)), **fields)


def job_of(request=None, max_tokens=600, **fields):
    request = request or request_of(**fields)
    return Job(
        "r",
        (),
        SamplingParams(),
        n=request.n,
        max_tokens=max_tokens,
        deadline_s=9.0,
        chat=request,
        num_prompt_estimated=5,
    )


async def ask(engine, request=None, **fields):
    """Never raises: an error is a part of the answer."""
    found = Answer()
    try:
        generation = engine.generate(job_of(request, **fields))
    except ServeError as error:
        found.error = error
        return found
    try:
        async for event in generation:
            found.take(event)
    except ServeError as error:
        found.error = error
    finally:
        await generation.aclose()
    found.produced = generation.produced
    return found
