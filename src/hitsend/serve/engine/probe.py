"""One upstream looked at for `hitsend engines check`: is it there, does it know us, what does it serve, how fast.

Enters: a started engine and one of its servers. Leaves: a `Probe`. Always true: at most one answer is asked for, of a
few tokens; what fails is a fact in the result and never an exception; it goes the same way as a request, so what works
here works there. Next: `openai.py`.
"""

import asyncio
from typing import Any

import msgspec

from hitsend.core.errors import ModelNotFound, ServeError
from hitsend.core.events import FirstToken, Sent
from hitsend.core.request import Message, Request, SamplingParams
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.openai import OpenAIEngine
from hitsend.serve.engine.profiles import Profile
from hitsend.serve.engine.protocol import Job
from hitsend.serve.engine.refusals import LacksModel
from hitsend.serve.engine.replicas import Replica

ASKED_TOKENS = 16
MAX_LIST_BYTES = 8 * 1024 * 1024
LIST_S = 10.0
"""For the list of models, which needs no model: somebody is waiting."""
ANSWER_S = 120.0
"""For the answer, whose model may have to be loaded; one that pings for ever is never silent."""


class Probe(msgspec.Struct, frozen=True):
    """None: not known. `listed`: whether its list of models has ours, by their names there.

    `gives_usage`: whether it said what it billed. `fault`: why a request would fail.
    """

    base_url: str
    reaches: bool
    authenticates: bool | None = None
    listed: dict[str, bool] | None = None
    ttft_ms: float | None = None
    gives_usage: bool | None = None
    fault: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether a request can be expected to work."""
        return self.reaches and self.authenticates is not False and self.fault is None


async def probe(engine: OpenAIEngine, server: Replica, *, asks: bool) -> Probe:
    """Look at its list of models, then ask for one short answer, if `asks`."""
    profile = engine.terms.profile
    try:
        async with asyncio.timeout(LIST_S):
            answer = await server.line.get(profile.models_path)
            body = await answer.read_whole(MAX_LIST_BYTES)
    except TimeoutError:
        return Probe(server.url, reaches=False, fault=f"its list of models did not come within {LIST_S:.0f} s")
    except LineFailed as failure:
        return Probe(server.url, reaches=False, fault=str(failure))
    found = Probe(server.url, reaches=True)
    if answer.status in (401, 403):
        return msgspec.structs.replace(found, authenticates=False, fault=f"it refuses the key (HTTP {answer.status})")
    names = _names(body or b"", profile) if answer.status == 200 else None
    if names is not None:
        ours = (*engine.terms.models.values(), *engine.settings.embedding_models.values())
        listed = {there: there in names for there in ours}
        found = msgspec.structs.replace(found, authenticates=True, listed=listed)
    return await _asked(engine, found) if asks else found


async def _asked(engine: OpenAIEngine, found: Probe) -> Probe:
    """One answer of its first model, or one vector where it has none that answers."""
    models, embedders = engine.terms.models, engine.settings.embedding_models
    there = next(iter((*models.values(), *embedders.values())), None)
    if there is None:
        return msgspec.structs.replace(found, fault="it serves no model (models, embedding_models)")
    try:
        async with asyncio.timeout(ANSWER_S):
            ttft_ms, is_given = await (_answer(engine, next(iter(models))) if models else _vector(engine))
    except TimeoutError:
        return msgspec.structs.replace(found, fault=f"its answer was not finished after {ANSWER_S:.0f} s")
    except ServeError as error:
        hint = f" Is base_url right, and {there} its name there?"
        fault = f"{error.code}: {error.message}{hint if isinstance(error, LacksModel | ModelNotFound) else ''}"
        return msgspec.structs.replace(found, fault=fault)
    return msgspec.structs.replace(found, authenticates=True, ttft_ms=ttft_ms, gives_usage=is_given)


async def _answer(engine: OpenAIEngine, model: str) -> tuple[float | None, bool]:
    """Milliseconds to its first token, and whether it said what it billed. Raises ServeError."""
    request = Request("check", model, (Message("user", "Say hi."),), stream=True)
    job = Job("check", (), SamplingParams(), n=1, max_tokens=ASKED_TOKENS, deadline_s=60.0, chat=request)
    sent_at: float | None = None
    ttft_ms: float | None = None
    generation = engine.generate(job)
    try:
        async for event in generation:
            if isinstance(event, Sent):
                sent_at = event.at
            elif isinstance(event, FirstToken) and sent_at is not None:
                ttft_ms = round((event.at - sent_at) * 1000, 3)
    finally:
        await generation.aclose()
    return ttft_ms, not generation.produced.is_estimate


async def _vector(engine: OpenAIEngine) -> tuple[float, bool]:
    """The same of a text's vector."""
    asking = engine.embed(next(iter(engine.settings.embedding_models)), ("Say hi.",), None, estimated=ASKED_TOKENS)
    began_at = engine.clock.now()
    try:
        await asking.vectors()
    finally:
        await asking.aclose()
    return round((engine.clock.now() - began_at) * 1000, 3), not asking.produced.is_estimate


def _names(body: bytes, profile: Profile) -> set[str] | None:
    """Of a list in any of the shapes there are; None for what is no list."""
    try:
        tree: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    rows = tree if isinstance(tree, list) else None
    for key in ("data", "result", "models"):
        if rows is None and isinstance(tree, dict) and isinstance(tree.get(key), list):
            rows = tree[key]
    if rows is None:
        return None
    return {str(row[profile.models_key]) for row in rows if isinstance(row, dict) and profile.models_key in row}
