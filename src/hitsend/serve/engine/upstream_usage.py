"""What an upstream says that it used, where it can be meant.

Enters: the `usage` of an answer or of an event, whatever it is. Leaves: `Usage`, or None. Always true: numbers are
whole and no larger than `MOST_TOKENS`; a part is never larger than the whole; what only the total has is in one of the
parts; what can't be read is none, so that an answer isn't lost by its bill: hitsend counts then, and says so. Next:
`openai_wire.py`.
"""

from typing import Any

from hitsend.core.request import Usage

MOST_TOKENS = 2**31 - 1
"""Of one request. More is a mistake, and the ledger's columns end somewhere too."""


_CACHED_APART = ("prompt_cache_hit_tokens", "cached_tokens")
"""Where DeepSeek and Kimi say what of the prompt was cached."""


def usage_of(given: Any, *, has_output: bool = True) -> Usage | None:
    """None where a count is missing, negative, no number, or too large. Without output the prompt is all."""
    if not isinstance(given, dict):
        return None
    prompt, output, total = (_count(given.get(name)) for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
    if not has_output:
        prompt, output = total if prompt is None else prompt, 0
    if output is None and given.get("completion_tokens") is None and prompt is not None and total is not None:
        output = _count(total - prompt)
    if prompt is None or output is None:
        return None
    cached = _part(given.get("prompt_tokens_details"), "cached_tokens")
    cached = cached or next((found for name in _CACHED_APART if (found := _count(given.get(name)))), 0)
    reasoning = _part(given.get("completion_tokens_details"), "reasoning_tokens")
    rest = 0 if total is None or not has_output else total - prompt - output
    if rest > 0 and rest == cached:  # relays of Anthropic's API count what was cached beside the prompt
        prompt += rest
    elif rest > 0:  # xAI and Gemini count thoughts beside the output, Gemini in the total alone, and both bill them
        output, reasoning = output + rest, reasoning or rest
    return Usage(prompt, output, min(cached, prompt), min(reasoning, output))


def may_be_bill(usage: Usage, num_counted: int) -> bool:
    """Whether it can be what an answer cost of which so many tokens were seen. Nothing at all may be (it was cached);
    an answer to no prompt, or text of no tokens, can't."""
    is_split = bool(usage.prompt_tokens) and bool(usage.completion_tokens or not num_counted)
    return is_split or not usage.total_tokens


def _count(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_one = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
    return value if is_one else None


def _part(details: Any, name: str) -> int:
    return (_count(details.get(name)) or 0) if isinstance(details, dict) else 0
