"""An answer on its way out, kept for the case that it is asked for again.

Enters: frames or a body, as the handler makes them. Leaves: the same, and the whole of it to the store. Always true: an
answer is kept only when its work came to a good end; a body is kept before its first byte goes out, so that a client
that lost the connection finds it; of an answer that is too large nothing stays in memory. Next: `recorded.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from hitsend.serve.stream.sse import CONTENT_TYPE
from hitsend.serve.usage.idempotency import Claim, IdempotencyStore, Kept


class Keeping:
    """One claim of a key, from the beginning of the work to its end."""

    def __init__(self, store: IdempotencyStore, claim: Claim) -> None:
        self._store = store
        self._claim = claim
        self._is_kept = False

    def body(self, work: Callable[[], Awaitable[bytes]]) -> Callable[[], Awaitable[bytes]]:
        """The same work, whose result is kept."""

        async def kept() -> bytes:
            body = await work()
            await self._keep(body, len(body), "application/json")
            return body

        return kept

    async def frames(self, frames: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """The same frames; kept once the last one was taken."""
        taken: list[bytes] = []
        num_bytes = 0
        async with aclosing(frames):
            async for frame in frames:
                num_bytes += len(frame)
                if num_bytes <= self._store.max_answer_bytes:
                    taken.append(frame)
                else:
                    taken.clear()
                yield frame
        await self._keep(b"".join(taken), num_bytes, CONTENT_TYPE.decode())

    def end(self) -> None:
        """Free the key, unless its answer was kept."""
        if not self._is_kept:
            self._store.release(self._claim)

    async def _keep(self, body: bytes, num_bytes: int, content_type: str) -> None:
        self._is_kept = True
        is_small = num_bytes <= self._store.max_answer_bytes
        answer = Kept(self._claim.asked.request_id, 200, content_type, body) if is_small else None
        await asyncio.shield(self._store.keep(self._claim, answer))
