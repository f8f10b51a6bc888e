"""Words for the end of an answer, as upstreams have been seen to write them; 2026-11.

Enters: nothing. Leaves: `ENDS` and `BROKE`, in lower case. Always true: what is in neither is no end that a client
could be told of. Next: `openai_wire.py`.
"""

from hitsend.core.lifecycle import FinishReason

_SAID = {
    FinishReason.STOP: "stop eos eos_token end_turn stop_sequence complete completed",
    # vLLM's `repetition` is an end that the model didn't choose
    FinishReason.LENGTH: "length max_tokens max_output_tokens model_length model_context_window_exceeded repetition",
    FinishReason.TOOL_CALLS: "tool_calls function_call tool_use tool_call",
    FinishReason.CONTENT_FILTER: "content_filter content_filtered safety recitation blocklist prohibited_content spii"
    " image_safety sensitive refusal guardrail_intervened",
}
ENDS: dict[str, FinishReason | None] = {word: reason for reason, words in _SAID.items() for word in words.split()}
"""What each means."""
ENDS |= {"null": None, "none": None}  # DashScope's word for none, which relays pass on

BROKE = frozenset(["error", "abort", "insufficient_system_resource", "network_error", "malformed_function_call"])
"""Failures: DeepSeek's, Zhipu's and Gemini's own among them."""
