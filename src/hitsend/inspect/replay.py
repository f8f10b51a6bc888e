"""A request that was recorded, asked once more: what to send, and where the new answer leaves the old one.

Enters: a flight record's JSON with captured token ids; later the record of the answer to `body_of`. Leaves: an export,
a body for `/v1/completions`, a `Comparison` per choice. Always true: pure; prompt and sampling are the recorded ones
but for what was changed on purpose; an export without texts replays like one with them. Next: `../cli/replay.py`.

Stop strings and grammars are not in a record: an answer that one of them ended is compared as far as it went, and one
that a grammar shaped may differ because nothing shapes it now.
"""

from typing import Any

import msgspec

from hitsend.core.errors import ConfigError

Record = dict[str, Any]

_TEXTS = ("output_text", "output_reasoning", "output_tool_calls")
_NOT_SENT = ("logprobs", "top_logprobs", "prompt_logprobs", "logit_bias")


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay needs of a record. `ended_itself`: choices that the model ended by a token of its own.

    `steps`: numbers of the engine's steps in which an only choice's tokens came, in order; empty where that can't be
    told. `texts`: what was said, unless it was left out.
    """

    kind: str = "hitsend.flight"
    version: int = 1
    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    max_tokens: int
    n: int
    output_token_ids: dict[str, list[int]]
    ended_itself: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    texts: dict[str, Any] | None = None


class Comparison(msgspec.Struct, frozen=True):
    """One choice. `at` is the first token (from 0) that differs, None where none does; `step` is the engine's step in
    which the recorded one came."""

    choice: int
    num_recorded: int
    num_replayed: int
    at: int | None
    step: int | None
    before: tuple[int, ...]
    recorded: tuple[int, ...]
    replayed: tuple[int, ...]


CONTEXT = 16
"""Tokens shown before a difference, and from it on."""


def export_of(record: Record, *, has_texts: bool) -> Export:
    """Raises ConfigError where the record has no token ids."""
    fitted, tokenized = _last(record, "fitted"), _last(record, "tokenized")
    ids = (tokenized or {}).get("prompt_token_ids")
    outputs = record.get("output_token_ids")
    if not ids or fitted is None or outputs is None:
        raise ConfigError(
            f"request {record.get('request_id')}: its record has no token ids; they are kept of requests of embedded "
            "models while record.text is on"
        )
    by_string = {str(event["choice"]) for event in record["events"] if event["type"] == "stop_matched"}
    ended = (event for event in record["events"] if event["type"] == "choice_finished")
    return Export(
        request_id=record["request_id"],
        model=record["model"],
        prompt_token_ids=tuple(ids),
        sampling=record["sampling"],
        max_tokens=fitted["max_tokens"],
        n=max(1, len(outputs)),
        output_token_ids=outputs,
        ended_itself=tuple(
            str(event["choice"])
            for event in ended
            if event["finish_reason"] == "stop" and str(event["choice"]) not in by_string
        ),
        steps=_steps(record, outputs),
        texts={name: record[name] for name in _TEXTS if name in record} if has_texts else None,
    )


def read_export(text: bytes, name: str) -> Export:
    """A saved one. Raises ConfigError where it is none."""
    try:
        found = msgspec.json.decode(text, type=Export)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} is no export of `hitsend inspect ID --export`: {error}") from error
    if found.kind != "hitsend.flight":
        raise ConfigError(f"{name} is no export of `hitsend inspect ID --export`: its kind is {found.kind!r}")
    return found


def body_of(export: Export, changes: dict[str, Any]) -> dict[str, Any]:
    """For `/v1/completions`. It may go on for one token beyond the recorded answer: does it end there too?"""
    lengths = (len(ids) + (choice in export.ended_itself) for choice, ids in export.output_token_ids.items())
    longest = max(lengths, default=1)
    body: dict[str, Any] = {
        "model": export.model,
        "prompt": list(export.prompt_token_ids),
        "n": export.n,
        "max_tokens": max(1, min(export.max_tokens, longest)),
    }
    body |= {name: value for name, value in export.sampling.items() if name not in _NOT_SENT}
    body["logit_bias"] = {str(token): bias for token, bias in export.sampling.get("logit_bias", ())}
    body["min_tokens"] = min(body.get("min_tokens", 0), body["max_tokens"])
    return body | changes


def compare(export: Export, replayed: Record) -> tuple[Comparison, ...]:
    """Choice by choice. Raises ConfigError where the new record has no token ids."""
    found = replayed.get("output_token_ids")
    if found is None:
        raise ConfigError("the server that replayed it keeps no token ids: record.text is off there")
    return tuple(
        _compare(export, choice, export.output_token_ids[choice], found.get(choice, []))
        for choice in sorted(export.output_token_ids, key=int)
    )


def _compare(export: Export, choice: str, recorded: list[int], replayed: list[int]) -> Comparison:
    shared = min(len(recorded), len(replayed))
    at = next((index for index in range(shared) if recorded[index] != replayed[index]), None)
    goes_on = len(replayed) > len(recorded) and choice in export.ended_itself
    if at is None and (len(replayed) < len(recorded) or goes_on):
        at = shared
    start = len(recorded) if at is None else at
    return Comparison(
        choice=int(choice),
        num_recorded=len(recorded),
        num_replayed=len(replayed),
        at=at,
        step=export.steps[at] if at is not None and at < len(export.steps) else None,
        before=tuple(recorded[max(0, start - CONTEXT) : start]),
        recorded=tuple(recorded[start : start + CONTEXT]),
        replayed=tuple(replayed[start : start + CONTEXT]),
    )


def _last(record: Record, kind: str) -> dict[str, Any] | None:
    return next((event for event in reversed(record["events"]) if event["type"] == kind), None)


def _steps(record: Record, outputs: dict[str, list[int]]) -> tuple[int, ...]:
    """The first token comes with the last of the prompt, each further one in a step of its own: if nothing was guessed
    ahead, left out or computed twice."""
    steps = [event for event in record["events"] if event["type"] == "step"]
    has_more = any(event.get("drafts") for event in steps) or record.get("steps_dropped") or _last(record, "preempted")
    if len(outputs) != 1 or has_more:
        return ()
    (ids,) = outputs.values()
    prompts = [event["step"] for event in steps if event["prefill_tokens"]]
    numbers = (*prompts[-1:], *(event["step"] for event in steps if event["decode_tokens"]))
    return tuple(numbers[: len(ids)]) if len(numbers) >= len(ids) else ()
