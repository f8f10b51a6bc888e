"""The wire: HTTP and OpenAI's or Anthropic's JSON on the outside, hitsend's own words on the inside.

Enters: ASGI messages. Leaves: ASGI messages, by way of `Request` and the pipeline's deltas. Always true: every response
carries the request id; a body is typed and bounded before anything expensive happens; no field of a request is dropped
in silence; what goes wrong before the first byte of an answer becomes a status and OpenAI's error body here and nowhere
else; decisions are made on the ASGI scope's path, never on a URL made from a header.
Read `routes.py`, then `body.py`, `strict_json.py`, `chat_request.py`, `chat_limits.py`, `chat_tools.py`,
`chat_messages.py`, `recorded.py`, `chat_completions.py`, `chat_calls.py`, `chat_response.py`, `chat_whole.py`,
`errors.py`. The other dialects stand on `dialect.py`, `wire.py`, `turns.py` and `blocks.py`: read `responses.py` and
what it names, then `messages.py`. The other routes (`completions.py`, `embeddings.py`, `dry_runs.py`) stand on the
chat's. Next chapter: `../chat/`.
"""
