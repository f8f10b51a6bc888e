"""What can be computed, and what can't: a request when it comes, a step's shares when they go through the decoder.

When a batch fails and the decoder says that it isn't fatal (nothing of it was kept), it is tried again: without drafts
first, then in halves until the sequences that can't be computed stand alone.

Enters: shares, sorted by slot. Leaves: logits of those that were computed, and who failed. Always true: every share is
in exactly one result or among the failed; logits of a step's one result may be the decoder's own memory, of several
they are copies. A fatal failure goes up. Next: `verify.py`.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest
from hitsend.serve.loop.batch import build_batch, by_adapter
from hitsend.serve.loop.decoder import Decoder, DecoderFailed
from hitsend.serve.loop.messages import Submit, what_is_wrong
from hitsend.serve.loop.roster import Share

Result = tuple[list[Share], NDArray[np.float32]]
Failed = tuple[Share, DecoderFailed]


def compute(decoder: Decoder, shares: list[Share], failed: list[Failed]) -> list[Result]:
    """All shares of a step, one adapter after the other. See `attempt`."""
    groups = by_adapter(shares)
    if len(groups) == 1:
        return attempt(decoder, shares, failed)
    return [result for group in groups for result in _kept(attempt(decoder, group, failed))]


def _kept(results: list[Result]) -> list[Result]:
    """Right also when the decoder has computed again."""
    return [(shares, logits.copy()) for shares, logits in results]


def attempt(decoder: Decoder, shares: list[Share], failed: list[Failed]) -> list[Result]:
    """Compute the shares; those that can't be are added to `failed`. Raises DecoderFailed where that is fatal."""
    batch = build_batch(shares)
    try:
        logits = decoder.decode(batch)
    except DecoderFailed as failure:
        if failure.is_fatal:
            raise
        if any(share.draft for share in shares):
            return attempt(decoder, [msgspec.structs.replace(share, draft=()) for share in shares], failed)
        if len(shares) == 1:
            failed.append((shares[0], failure))
            return []
        half = len(shares) // 2
        return _kept(attempt(decoder, shares[:half], failed)) + attempt(decoder, shares[half:], failed)
    expected = (int(batch.wants_logits.sum()), decoder.vocab_size)
    if logits.shape != expected:
        raise DecoderFailed(f"logits of shape {logits.shape}, expected {expected}", is_fatal=True)
    return [(shares, logits)]


def refusal(submit: Submit, decoder: Decoder, limit: int) -> InvalidRequest | ContextLengthExceeded | None:
    """Why it can never be computed here: `limit` tokens are the most that one sequence can have."""
    invalid = what_is_wrong(submit, decoder.vocab_size, decoder.adapter_names)
    if invalid is not None:
        return InvalidRequest(invalid)
    num_prompt_tokens = len(submit.prompt_token_ids)
    if num_prompt_tokens + 1 > limit:
        return ContextLengthExceeded(
            f"The prompt has {num_prompt_tokens} tokens; with at least 1 for the answer that is more than the "
            f"{limit} that one sequence can have here.",
            param="messages",
        )
    return None
