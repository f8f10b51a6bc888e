"""Why a request took as long as it did, what would have changed it, and what it cost.

Enters: a flight record's JSON. Leaves: an `Explanation`. Always true: pure; the causes add up to the record's wall
time; what isn't known from this record alone is called an estimate and says from what it was made. Next: `web/page.js`.

A step that a request shares is as long as all of its tokens make it. Its time is divided by their weight: one decoded
token against one prefilled one, taken from the request's own steps where these tell (`_decode_weight`), else
`USUAL_WEIGHT`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

USUAL_WEIGHT = 2.0
"""A decoded token costs as much as this many prefilled ones, where the record doesn't tell: measured between 1.3 (32
sequences at once) and 4 (one) on the CPUs in `docs/decisions`."""

MOST_WEIGHT = 16.0

DRAFTED, KEPT = 4, 0.5
"""What a speculation is assumed to do where none was made: drafts of four tokens, each kept with this chance."""

Record = dict[str, Any]


class Cause(msgspec.Struct, frozen=True):
    """A part of the wall time. `share` of 1."""

    name: str
    ms: float
    share: float
    text: str


class Change(msgspec.Struct, frozen=True):
    """What would have made it shorter or cheaper: estimates, with what they rest on."""

    name: str
    saved_ms: float
    saved_microusd: int
    basis: str


class Cost(msgspec.Struct, frozen=True):
    """One kind of token on the bill."""

    kind: str
    num_tokens: int
    microusd: int


class Explanation(msgspec.Struct, frozen=True):
    """`largest` names the cause that took the most. `cache`: what the prefix cache did, in one sentence, or None."""

    request_id: str
    wall_ms: float
    causes: tuple[Cause, ...]
    largest: str
    changes: tuple[Change, ...]
    cost: tuple[Cost, ...]
    cache: str | None = None


TEXTS = {
    "waiting": "waiting for cells and a slot",
    "own_prefill": "computing its own prompt",
    "others_prefill": "prompts of others in its steps",
    "others_decode": "answers of others in its prompt's steps",
    "decode_alone": "decoding with the engine to itself",
    "decode_shared": "decoding in a batch with others",
    "slow_client": "the client didn't read",
    "upstream": "the upstream worked",
    "edge": "HTTP, template, tokenizer, holds and bill",
}
"""Every cause, in the order in which a request meets them."""


def explain(record: Record) -> Explanation:
    """The whole explanation; a record that is still open is explained as far as it got."""
    spent = _causes(record)
    wall = float(record["wall_ms"])
    causes = tuple(
        Cause(name, round(spent[name], 4), round(spent[name] / wall, 6) if wall else 0.0, text)
        for name, text in TEXTS.items()
    )
    return Explanation(
        request_id=record["request_id"],
        wall_ms=wall,
        causes=causes,
        largest=max(causes, key=lambda cause: cause.ms).name,
        changes=tuple(sorted(_changes(record, spent), key=lambda change: -change.saved_ms)),
        cost=tuple(_cost(record)),
        cache=_cache(record),
    )


def _causes(record: Record) -> dict[str, float]:
    segments = {segment["name"]: float(segment["ms"]) for segment in record["segments"]}
    prefill, decode = segments.get("prefill_shared", 0.0), segments.get("decode_shared", 0.0)
    shares = _shares(record)
    spent = dict.fromkeys(TEXTS, 0.0)
    spent["waiting"] = segments.get("wait", 0.0)
    spent["others_decode"] = prefill * shares.decodes_beside_prompt
    spent["others_prefill"] = prefill * shares.prompts_beside_prompt + decode * shares.prompts_beside_decode
    spent["own_prefill"] = segments.get("prefill_own", 0.0) + prefill * shares.own_prompt
    spent["decode_alone"] = segments.get("decode_own", 0.0)
    spent["decode_shared"] = decode * (1.0 - shares.prompts_beside_decode)
    spent["slow_client"] = segments.get("client_wait", 0.0)
    spent["upstream"] = segments.get("upstream", 0.0)
    spent["edge"] = max(0.0, float(record["wall_ms"]) - sum(spent.values()))
    return spent


class _Shares(msgspec.Struct, frozen=True):
    """Of the time of steps that it shared: while it computed its prompt, and while it decoded."""

    prompts_beside_prompt: float = 0.0
    decodes_beside_prompt: float = 0.0
    prompts_beside_decode: float = 0.0

    @property
    def own_prompt(self) -> float:
        return 1.0 - self.prompts_beside_prompt - self.decodes_beside_prompt


def _shares(record: Record) -> _Shares:
    """By the weight of tokens. Steps beyond `record.max_steps` aren't kept one by one: they count as the others do."""
    weight = _decode_weight(record)
    prompt_ms = decode_ms = prompts_in_prompt = decodes_in_prompt = prompts_in_decode = 0.0
    for step in _steps(record):
        ms = step["at_ms"] - step["started_ms"]
        prompts = step["batch_prefill_tokens"] - step["prefill_tokens"]
        decodes = weight * (step["batch_decode_tokens"] - step["decode_tokens"])
        batch = step["batch_prefill_tokens"] + weight * step["batch_decode_tokens"]
        if ms <= 0 or prompts + decodes <= 0:
            continue
        if step["prefill_tokens"]:
            prompt_ms += ms
            prompts_in_prompt += ms * prompts / batch
            decodes_in_prompt += ms * decodes / batch
        else:
            decode_ms += ms
            prompts_in_decode += ms * prompts / batch
    beside_prompt = (prompts_in_prompt / prompt_ms, decodes_in_prompt / prompt_ms) if prompt_ms else (0.0, 0.0)
    return _Shares(*beside_prompt, prompts_in_decode / decode_ms if decode_ms else 0.0)


def _decode_weight(record: Record) -> float:
    """What one decoded token cost in prefilled ones, from steps of its own that had only one kind; else the usual."""
    ms, tokens = {"prefill": 0.0, "decode": 0.0}, {"prefill": 0, "decode": 0}
    for step in _steps(record):
        kinds = [kind for kind in ms if step[f"batch_{kind}_tokens"]]
        if len(kinds) == 1:
            ms[kinds[0]] += step["at_ms"] - step["started_ms"]
            tokens[kinds[0]] += step[f"batch_{kinds[0]}_tokens"]
    if not all(tokens.values()) or not all(ms.values()):
        return USUAL_WEIGHT
    return min(MOST_WEIGHT, max(1.0, ms["decode"] / tokens["decode"] * tokens["prefill"] / ms["prefill"]))


def _changes(record: Record, spent: dict[str, float]) -> Iterator[Change]:
    usage = record["usage"]
    computed = usage["prompt_tokens"] - usage["cached_tokens"]
    if spent["own_prefill"] > 0 and computed > 1:
        saved = spent["own_prefill"] * (computed - 1) / computed
        basis = f"all {computed} prompt tokens that were computed, but the last, would have been cached"
        cheaper = _priced(record["ledger"], "input", computed - 1, "cached_input")
        yield Change("prefix_hit", _ms(saved), cheaper, basis)
        half = computed // 2
        basis = f"{half} prompt tokens fewer, at this request's own time per prompt token"
        saved = spent["own_prefill"] * half / computed
        yield Change("shorter_prompt", _ms(saved), _priced(record["ledger"], "input", half), basis)
    decode = spent["decode_alone"] + spent["decode_shared"]
    thoughts, output = usage["reasoning_tokens"], usage["completion_tokens"]
    if thoughts and output:
        basis = f"{thoughts} of {output} output tokens were thoughts, at this request's own time per output token"
        yield Change(
            "thinking_off", _ms(decode * thoughts / output), _priced(record["ledger"], "output", thoughts), basis
        )
    if spent["waiting"] > 0:
        yield Change("higher_tier", _ms(spent["waiting"]), 0, "at most: all of its waiting, if nobody else is as high")
    others = spent["others_prefill"] + spent["others_decode"]
    if others > 0:
        yield Change("alone", _ms(others), 0, "no tokens of others in its prompt's steps, no prompts in its answer's")
    if spent["decode_alone"] > 0 and not _drafts(record):
        passes = sum(KEPT**n for n in range(DRAFTED + 1))
        basis = f"drafts of {DRAFTED} tokens, each kept with a chance of {KEPT:g} (assumed): {passes:.2f} tokens a pass"
        yield Change("speculation", _ms(spent["decode_alone"] * (1.0 - 1.0 / passes)), 0, basis)


def _drafts(record: Record) -> int:
    return sum(len(step.get("drafts", ())) for step in _steps(record))


def _cost(record: Record) -> Iterator[Cost]:
    """The row's cost by kind of token. What a kind's own price leaves of a micro-dollar goes to the dearest kind, so
    that they add up to the row."""
    row, usage = record["ledger"], record["usage"]
    if row is None:
        return
    cached, thoughts = usage["cached_tokens"], usage["reasoning_tokens"]
    counts = {
        "input": usage["prompt_tokens"] - cached,
        "cached_input": cached,
        "reasoning": thoughts,
        "output": usage["completion_tokens"] - thoughts,
    }
    priced = {kind: _priced(row, "output" if kind == "reasoning" else kind, num) for kind, num in counts.items()}
    dearest = max(priced, key=lambda kind: priced[kind])
    priced[dearest] += row["cost_microusd"] - sum(priced.values())
    for kind, num in counts.items():
        yield Cost(kind, num, priced[kind])


def _priced(row: Record | None, kind: str, num_tokens: int, instead: str | None = None) -> int:
    """What so many tokens cost at the row's prices, in micro-USD; with `instead`, how much less they would have at
    that price."""
    price = _price(row, kind) - (_price(row, instead) if instead else 0)
    return num_tokens * price // 1_000_000


def _price(row: Record | None, kind: str) -> int:
    """Pico-USD per token. Cached input costs as much as other input where the row says nothing else."""
    price = (row or {}).get(f"price_{kind}_picousd")
    if price is None and kind == "cached_input":
        return _price(row, "input")
    return int(price or 0)


_LIMITS = {
    "checkpoint": "the rest had no state to go on from (models with recurrent layers can't go back inside a run)",
    "step": "the rest is less than a step (engine.prefix_cache_step) or the last token, which are computed anew",
    "place": "the rest was no longer there, not yet computed, or had no room",
}
"""By `PrefixMatched.limited_by`."""


def _cache(record: Record) -> str | None:
    """What the prefix cache did for it: the first choice computes the prompt."""
    matched = next((event for event in record["events"] if event["type"] == "prefix_matched"), None)
    if matched is None:
        return None
    text = f"{matched['cached_tokens']} of {matched['prompt_tokens']} prompt tokens came from the cache"
    text += f" ({matched['source']})" if matched["source"] else ""
    if matched["matched_tokens"] > matched["cached_tokens"]:
        why = _LIMITS.get(matched.get("limited_by") or "", "the rest could not be used")
        text += f"; {matched['matched_tokens']} were known, {why}"
    elif not matched["matched_tokens"]:
        text += "; nothing of its tenant that is still there begins like it"
    if matched["differs_at"] is not None:
        was, now = (matched[f"{side}_text"] for side in ("cached", "prompt"))
        if was is None or now is None:
            was, now = (f"token {matched[f'{side}_token_id']}" for side in ("cached", "prompt"))
        else:
            was, now = repr(was), repr(now)
        text += f"; they part at token {matched['differs_at']}: {was} in the cache, {now} here"
    return text


def _steps(record: Record) -> Iterable[Record]:
    return (event for event in record["events"] if event["type"] == "step")


def _ms(value: float) -> float:
    return round(value, 3)
