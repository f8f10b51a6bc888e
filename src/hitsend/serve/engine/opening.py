"""One attempt at an upstream, from its head to the first word of its answer.

Enters: an answer whose head is there. Leaves: an `Opened`: its first words, or the refusal that came in their place.
Always true: whether it is a stream is told by how it begins, whatever its head calls it; an error in place of an answer
is a refusal, whatever status stood above it, and so is an answer that ends before it has begun, so that both can still
become a status, or another attempt; what was refused did no work, unless it gave a usage or ran out of time; a closed
answer is read no further. Next: `openai_wire.py`.
"""

import re

import msgspec

from hitsend.core.errors import EngineFailed, EngineTimeout
from hitsend.core.request import Delta, Usage
from hitsend.serve.engine.http1 import LineFailed
from hitsend.serve.engine.openai_wire import ChunkReader, UpstreamSaid
from hitsend.serve.engine.profiles import Profile
from hitsend.serve.engine.refusals import Refusal, broken, known, refusal_of, said, streamless
from hitsend.serve.engine.upstream import UpstreamAnswer

MAX_WHOLE_BYTES = 16 * 1024 * 1024
"""Of an answer that is no stream."""
_STREAM = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:data|event|id|retry)?:")
"""How one begins that is called JSON, text or nothing: relays and proxies are seen to do that."""
_TOLD_BY = len(b"retry:")


class Opened(msgspec.Struct):
    """`deltas`: what came of the answer so far, read from `num_bytes` by `reader`; `is_at_end`: no more will."""

    reader: ChunkReader
    answered_at: float = 0.0
    answer: UpstreamAnswer | None = None
    refusal: Refusal | None = None
    deltas: list[Delta] = []
    num_bytes: int = 0
    is_stream: bool = True
    is_at_end: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether it is an answer: anything of it came, be it only its end."""
        return any(self.reader.counts) or self.reader.is_finished or any(not one.prompt_ids for one in self.deltas)

    @property
    def may_have_worked(self) -> bool:
        """Whether it has a cost: it spoke, fell silent over it, or said so."""
        refusal = self.refusal
        return refusal is None or isinstance(refusal.error, EngineTimeout) or bool(self.usage.total_tokens)

    @property
    def usage(self) -> Usage:
        """As far as it came."""
        seen = self.reader.usage or Usage()
        return msgspec.structs.replace(seen, completion_tokens=max(seen.completion_tokens, sum(self.reader.counts)))

    async def read(self, answer: UpstreamAnswer, name: str, profile: Profile, wall: float) -> None:
        """From the head of `answer` on. Cancelling it closes that; of what is refused nothing is open any more."""
        self.answer = answer
        try:
            self.refusal = await refusal_of(answer, name, profile, wall=wall)
            if self.refusal is None:
                self.refusal = await self._begin(answer, name, profile, wall)
        except LineFailed as failure:
            is_untouched = _is_stream(answer) and not self.num_bytes and not failure.is_timeout
            self.refusal = Refusal(broken(failure, name), may_repeat=is_untouched)
        except BaseException:
            answer.close()
            raise
        if self.refusal is not None:
            answer.close()

    async def _begin(self, answer: UpstreamAnswer, name: str, profile: Profile, wall: float) -> Refusal | None:
        begin = await answer.read() if _is_stream(answer) else await _begin_of(answer)
        is_other = begin.startswith(b"{") if _is_stream(answer) else _STREAM.match(begin)
        self.is_stream = _is_stream(answer) is not bool(is_other)
        if self.is_stream:
            await self._hear(answer, begin)
        else:
            self.num_bytes = len(begin)
            whole = begin + (await answer.read_whole(MAX_WHOLE_BYTES) or b"")
            if (refusal := known(whole, name, profile, wall=wall)) is not None:
                return refusal
            self.num_bytes, self.deltas, self.is_at_end = len(whole), self.reader.feed_whole(whole), True
        return None if self.has_begun else self._nothing(name, profile, wall)

    async def _hear(self, answer: UpstreamAnswer, data: bytes) -> None:
        """From `data` on, which has come."""
        reader = self.reader
        while not (self.has_begun or self.is_at_end or reader.is_done or reader.fault is not None):
            data = data or await answer.read()
            self.num_bytes += len(data)
            self.is_at_end = not data
            self.deltas = [*self.deltas, *reader.feed(data or ending(answer))]
            data = b""

    def _nothing(self, name: str, profile: Profile, wall: float) -> Refusal:
        """Why it is over before it began."""
        fault = self.reader.fault
        if isinstance(fault, UpstreamSaid):
            refusal = said(fault.said, name, profile, wall=wall)
            # what it bills it has done
            return msgspec.structs.replace(refusal, may_repeat=refusal.may_repeat and self.reader.usage is None)
        if fault is not None:
            return Refusal(EngineFailed(f"The upstream {name} sent {fault}."))
        if not self.is_stream:
            return streamless(name)
        error = EngineFailed(f"The upstream {name} ended its answer before its end.")
        return Refusal(error, may_repeat=not self.num_bytes)


def _is_stream(answer: UpstreamAnswer) -> bool:
    return answer.content_type == "text/event-stream"


async def _begin_of(answer: UpstreamAnswer) -> bytes:
    """As much as tells a stream from an answer that comes whole; before that some send blanks, to be waited for."""
    begin = b""
    while len(begin.lstrip()) < _TOLD_BY and len(begin) < MAX_WHOLE_BYTES and (data := await answer.read()):
        begin += data
    return begin


def ending(answer: UpstreamAnswer) -> bytes:
    """What an answer that surely wasn't cut may lack: the empty line behind its last event."""
    return b"\n\n" if answer.is_framed else b""
