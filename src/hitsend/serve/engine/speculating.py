"""Whether and how the engine's child guesses ahead: found out from the loaded model, not believed.

Enters: settings and a decoder that holds nothing yet. Leaves: the way to guess, or why there is none, and the
`Speculator` for the loop. Always true: without a decoder that takes tokens back nothing is guessed; a draft model or a
head that was asked for and can't work is a ConfigError with a reason. Next: `../loop/verify.py`.
"""

from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from hitsend.core.clock import Clock
from hitsend.core.drafts import MAX_DRAFT
from hitsend.core.errors import ConfigError
from hitsend.gguf import GgufHeader, read_header
from hitsend.serve.engine.adapters import Adapters
from hitsend.serve.engine.libllama import Library
from hitsend.serve.engine.llama_decoder import LlamaDecoder
from hitsend.serve.engine.mtp import MtpHead
from hitsend.serve.engine.shape import memory_shape, why_unusable_head
from hitsend.serve.engine.vocabulary import LoadedModel
from hitsend.serve.loop.decoder import Batch
from hitsend.serve.loop.draft_model import DraftModel
from hitsend.serve.loop.messages import EngineFacts
from hitsend.serve.loop.own_head import BOLD_CHANCE, Likelier, OwnHead
from hitsend.serve.loop.speculate import LENGTHS, KnownCosts, StepCosts, draft_lengths
from hitsend.serve.loop.trust import FIRST_CHANCE
from hitsend.serve.loop.verify import GoingBack, PromptLookup, Proposer, Speculator
from hitsend.settings import EngineSettings

_SHARES = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
"""What a token more may be found to cost, as a share of a pass of one token. Less than the first changes little."""

SURE = 0.99
"""How often a good draft model is right at best."""

Seconds = Callable[[int, int], float]
"""What guesses take: of so many sequences, so many tokens each."""

_LAST = 2
"""The position up to which tokens are kept when going back is tried."""

LEAST_ROOM = _LAST + 1
"""Tokens of a step and of a sequence without which that can't be tried."""

_TRIED, _TRIES = 7, 6
"""Tokens more, and how often both lengths are tried: a third of a second with the bundled model on two cores."""


def way_to_speculate(decoder: LlamaDecoder, settings: EngineSettings, no_head: str) -> tuple[str, str]:
    """`off`, or who guesses, joined by `+`; and why it is off or less than could be. The decoder holds nothing.

    `no_head`: why the model's own head can't be asked; empty: it can. Raises ConfigError where a way was asked for by
    name and can't be gone.
    """
    asked = settings.speculation
    if asked == "off":
        return "off", ""
    if not takes_back(decoder):
        room = min(decoder.cells_per_slot, decoder.max_batch_tokens)
        reason = "the model keeps one state per sequence and can't take tokens back"
        if room < LEAST_ROOM:
            reason = f"steps have room for {room} tokens (engine.step_tokens), needed are {LEAST_ROOM}"
        if asked != "auto":
            raise ConfigError(f"engine.speculation: {asked} needs wrong guesses to be taken back, but {reason}")
        return "off", reason
    if asked != "auto":
        return asked, ""
    if settings.draft_model is not None:
        return "draft", ""
    return ("prompt_lookup", no_head if "lacks" in no_head else "") if no_head else ("prompt_lookup+mtp", "")


def takes_back(decoder: LlamaDecoder) -> bool:
    """Whether the decoder forgets the last one of three tokens when told to, and goes on as without it: tried, not
    believed.
    """
    logits: list[NDArray[np.float32]] = []
    if min(decoder.cells_per_slot, decoder.max_batch_tokens) < LEAST_ROOM:
        return False
    try:
        for tokens in ((1, 1), (1, 2)):
            for start, ids in ((0, (1,)), (1, tokens)):
                decoder.decode(_one_sequence(ids, start, has_drafts=len(ids) > 1))
            if not decoder.truncate(0, _LAST):
                return False
            logits.append(decoder.decode(_one_sequence((1,), _LAST)))
            decoder.release(0)
    finally:
        decoder.release(0)
    without, wrong = logits
    return bool(np.allclose(without, wrong, atol=0.01 * float(without.std())))


def _one_sequence(ids: tuple[int, ...], start: int, *, has_drafts: bool = False) -> Batch:
    tokens = np.array(ids, dtype=np.int32)
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    return Batch(tokens, positions, 0 * tokens, np.ones(len(ids), dtype=np.bool_), has_drafts=has_drafts)


def measured(decoder: LlamaDecoder, clock: Clock) -> KnownCosts:
    """What a token more costs, beside a pass of one: from the fastest of a few passes, rounded to `_SHARES`.

    So coarse that the next start of the server on the same machine finds the same, as a rule.
    """
    lengths = (1, 1 + _TRIED)
    if min(decoder.cells_per_slot, decoder.max_batch_tokens) < lengths[1]:
        return KnownCosts(1 - StepCosts.PRIOR, StepCosts.PRIOR)
    fastest = dict.fromkeys(lengths, float("inf"))
    for length in lengths * _TRIES:
        batch = _one_sequence((1,) * length, 0)
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
) -> tuple[Speculator | None, EngineFacts]:
    """What `facts.speculation` says, and what came of it. Loads a draft model, makes a head. Raises ConfigError."""
    if facts.speculation == "off":
        return None, facts
    back = going_back(decoder)
    if facts.speculation == "draft":
        drafting = _draft_decoder(decoder, facts, settings, clock)
        drafter = DraftModel(drafting, clock, drafting.warm_up())
        if not can_pay(drafter.seconds, SURE, costs := measured(decoder, clock), back, most=LENGTHS[-1]):
            facts = _doubted(facts, f"engine.draft_model is {settings.draft_model}", drafter.seconds, costs)
        return Speculator(drafter, going_back=back), facts
    alone = measured(decoder, clock)
    ways: list[Proposer] = [PromptLookup()] if "prompt_lookup" in facts.speculation else []
    if "mtp" in facts.speculation:
        head = MtpHead(decoder.model, decoder.context, decoder.plan, num_threads=facts.num_threads)
        head.measure(clock)
        chance = BOLD_CHANCE if back.is_again else FIRST_CHANCE
        pays = can_pay(head.seconds, chance, alone, back)
        if ways and not pays:
            head.close()
            reason = "the model's MTP head is too slow here, beside the model itself, to save time"
            facts = msgspec.structs.replace(facts, speculation="prompt_lookup", speculation_reason=reason)
        else:
            if not pays:
                facts = _doubted(facts, "engine.speculation is mtp", head.seconds, alone)
            decoder.head = head
            ways.append(OwnHead(head, chance))
    proposer = ways[0] if len(ways) == 1 else Likelier(ways)
    return Speculator(proposer, alone=alone, going_back=back), facts


def can_pay(seconds: Seconds, chance: float, costs: StepCosts, back: GoingBack, *, most: int = 1) -> bool:
    """Whether a sequence that is alone would ever be guessed for, if guesses (of `most` tokens) are right so often."""
    return any(draft_lengths([chance], [most], costs, seconds, is_again=back.is_again))


def _doubted(facts: EngineFacts, what: str, seconds: Seconds, costs: StepCosts) -> EngineFacts:
    """Who was asked for by name stays, and it is said what to expect."""
    guess_ms, token_ms = 1e3 * seconds(1, 1), 1e3 * costs.seconds(1, 1)
    why = f"a guess took {guess_ms:.1f} ms just now, a token of the model {token_ms:.1f}: too slow to save time alone"
    return msgspec.structs.replace(facts, speculation_reason=why, unmet=(*facts.unmet, f"{what}: {why}"))


def going_back(decoder: LlamaDecoder) -> GoingBack:
    """What the decoder can take back of a draft."""
    if decoder.can_go_back:
        return GoingBack()
    return GoingBack(decoder.num_snapshots or MAX_DRAFT, is_again=not decoder.num_snapshots)


def why_no_head(header: GgufHeader, library: Library, settings: EngineSettings) -> str:
    """Empty where the model has a head that can be asked."""
    reason = why_unusable_head(header)
    if reason or settings.speculation not in ("auto", "mtp"):
        return reason or "it isn't loaded"
    lacking = library.lacks_for_head
    return f"{library.name} lacks {lacking}, without which MTP heads can't run" if lacking else ""


def check_words(path: str, words: tuple[bytes, ...], expected: tuple[bytes, ...], model: str) -> None:
    """Raises ConfigError where a draft model has other words than the model that it guesses for."""
    if words != expected:
        raise ConfigError(
            f"engine.draft_model: {path} has another vocabulary ({len(words)} tokens) than "
            f"{model} ({len(expected)} tokens); every token has to mean the same in both"
        )


def check_head(header: GgufHeader, library: Library, settings: EngineSettings) -> None:
    """To be asked before it is loaded. Raises ConfigError where a head was asked for by name and there is none."""
    no_head = why_no_head(header, library, settings)
    if settings.speculation == "mtp" and no_head:
        raise ConfigError(f"engine.speculation: mtp needs the model's own head, but {no_head}")


def _draft_decoder(decoder: LlamaDecoder, facts: EngineFacts, settings: EngineSettings, clock: Clock) -> LlamaDecoder:
    path = settings.draft_model or ""
    header = read_header(path)
    memory_shape(header)
    model = LoadedModel(decoder.model.library, path)
    check_words(path, model.vocabulary.token_bytes(), decoder.token_bytes, facts.model)
    drafting = LlamaDecoder(
        model,
        decoder.plan,
        clock,
        step_tokens=decoder.max_batch_tokens,
        num_threads=facts.num_threads,
        is_unified=facts.kv_mode == "unified",
        adapters=Adapters(model, header, path, where="engine.draft_model"),
    )
    if not drafting.can_go_back:
        raise ConfigError(f"engine.draft_model: {path} keeps one state per sequence and can't take tokens back")
    return drafting
