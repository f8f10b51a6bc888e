"""Whether and how the engine's child guesses ahead: found out from the loaded model, not believed.

Enters: settings and a decoder that holds nothing yet. Leaves: the way to guess, or why there is none, and the
`Speculator` for the loop. Always true: without a decoder that takes tokens back nothing is guessed; a draft model that
can't work is a ConfigError with a reason. Next: `../loop/verify.py`.
"""

import numpy as np

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.gguf import read_header
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.shape import memory_shape
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch, Decoder
from hitsend.serve.loop.draft_model import DraftModel
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.loop.speculate import KnownCosts, StepCosts
from hitsend.serve.loop.verify import PromptLookup, Speculator
from hitsend.settings import EngineSettings

_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""What a token more may be found to cost, as a share of a pass of one token. Less than the first changes little."""

_TRIED, _TRIES = 7, 6
"""Tokens more, and how often both lengths are tried: a third of a second with the bundled model on two cores."""


def way_to_speculate(decoder: Decoder, settings: EngineSettings) -> tuple[str, str]:
    """`off`, `prompt_lookup` or `draft`; and why it is off, where that wasn't asked for. The decoder holds nothing.

    Raises ConfigError where a way was asked for by name and can't be gone.
    """
    asked = settings.speculation
    if asked == "draft" and settings.draft_model is None:
        raise ConfigError("engine.speculation: draft needs engine.draft_model to say with which model")
    if asked == "off":
        return "off", ""
    if not can_go_back(decoder):
        reason = "the model keeps one state per sequence and can't take tokens back"
        if asked != "auto":
            raise ConfigError(f"engine.speculation: {asked} needs wrong guesses to be taken back, but {reason}")
        return "off", reason
    if asked == "auto":
        return ("prompt_lookup" if settings.draft_model is None else "draft"), ""
    return asked, ""


def can_go_back(decoder: Decoder) -> bool:
    """Whether the decoder forgets the last of two tokens when told to: tried, not believed."""
    one = np.ones(1, dtype=np.int32)
    try:
        for place in range(2):
            decoder.decode(Batch(one, place * one, 0 * one, np.ones(1, dtype=np.bool_)))
        return decoder.truncate(0, 1)
    finally:
        decoder.release(0)


def measured(decoder: LlamaDecoder, clock: Clock) -> KnownCosts:
    """What a token more costs, beside a pass of one: from the fastest of a few passes, rounded to `_SHARES`.

    So coarse that the next start of the server on the same machine finds the same, as a rule.
    """
    lengths = (1, 1 + _TRIED)
    if min(decoder.cells_per_slot, decoder.max_batch_tokens) < lengths[1]:
        return KnownCosts(1 - StepCosts.PRIOR, StepCosts.PRIOR)
    fastest = dict.fromkeys(lengths, float("inf"))
    for length in lengths * _TRIES:
        ids = np.ones(length, dtype=np.int32)
        batch = Batch(ids, np.arange(length, dtype=np.int32), 0 * ids, np.ones(length, dtype=np.bool_))
        before = clock.now()
        decoder.decode(batch)
        fastest[length] = min(fastest[length], clock.now() - before)
        decoder.release(0)
    one, more = fastest.values()
    share = (more / one - 1) / _TRIED if one > 0 else StepCosts.PRIOR
    nearest = min(_SHARES, key=lambda each: abs(each - share))
    return KnownCosts((1 - nearest) * one, nearest * one)


def speculator_for(
    decoder: LlamaDecoder, facts: EngineFacts, settings: EngineSettings, clock: Clock
) -> Speculator | None:
    """What `facts.speculation` says. Loads the draft model. Raises ConfigError."""
    if facts.speculation == "prompt_lookup":
        return Speculator(PromptLookup(), alone=measured(decoder, clock))
    if facts.speculation == "draft" and settings.draft_model is not None:
        drafting = _draft_decoder(decoder, facts, settings, clock)
        return Speculator(DraftModel(drafting, clock, drafting.warm_up()))
    return None


def _draft_decoder(decoder: LlamaDecoder, facts: EngineFacts, settings: EngineSettings, clock: Clock) -> LlamaDecoder:
    path = settings.draft_model or ""
    header = read_header(path)
    memory_shape(header)
    model = LoadedModel(decoder.model.library, path)
    if model.vocabulary.token_bytes() != decoder.token_bytes:
        raise ConfigError(
            f"engine.draft_model: {path} has another vocabulary ({model.vocabulary.num_tokens} tokens) than "
            f"{facts.model} ({decoder.vocab_size} tokens); every token has to mean the same in both"
        )
    drafting = LlamaDecoder(
        model,
        decoder.plan,
        clock,
        step_tokens=decoder.max_batch_tokens,
        num_threads=facts.num_threads,
        is_unified=facts.kv_mode == "unified",
        adapters=Adapters(model, header, path),
    )
    if not can_go_back(drafting):
        raise ConfigError(f"engine.draft_model: {path} keeps one state per sequence and can't take tokens back")
    return drafting
