"""`POST /tokenize` and `POST /detokenize`.

Enters: JSON bodies. Leaves: token ids, text. Always true: the same limits and the same strict reading as a chat
request; what a caller types never becomes a control token unless the caller asks for it with `parse_special`. Next:
`inspect.py`.
"""

from typing import Any, TypeVar

import msgspec

from hitsend.core.errors import InvalidRequest
from hitsend.serve.api import chat_request, strict_json
from hitsend.serve.api.body import read_json_body
from hitsend.serve.api.exchange import Exchange

_T = TypeVar("_T")


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Either `content` (llama-server's name), `prompt` (vLLM's name) or `messages`."""

    content: str | None = None
    prompt: str | None = None
    messages: Any = None
    model: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token ids in order."""

    tokens: list[int]
    model: str | None = None


async def tokenize(exchange: Exchange) -> None:
    """Answer `{"tokens": [...], "count": n}`."""
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    wire, tree = _read(exchange, body, TokenizeBody)
    exchange.check_tokenizer(wire.model)
    given = [name for name in ("content", "prompt", "messages") if getattr(wire, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("give exactly one of content, prompt and messages", param=given[1] if given else "content")
    if wire.messages is not None:
        tokens = await _chat_tokens(exchange, tree)
    else:
        text = wire.content if wire.content is not None else wire.prompt
        add_special = bool(wire.add_special or wire.add_special_tokens)
        tokens = await exchange.services.text.tokenize(
            text or "", add_special=add_special, parse_special=bool(wire.parse_special), model=wire.model
        )
    await exchange.answer_json({"tokens": tokens, "count": len(tokens)})


async def detokenize(exchange: Exchange) -> None:
    """Answer the text under both names that clients look for."""
    body = await read_json_body(exchange.receive, exchange.headers, exchange.services.access)
    wire, _ = _read(exchange, body, DetokenizeBody)
    exchange.check_tokenizer(wire.model)
    text = await exchange.services.text.detokenize(tuple(wire.tokens), model=wire.model)
    await exchange.answer_json({"content": text, "prompt": text})


async def _chat_tokens(exchange: Exchange, tree: dict[str, Any]) -> tuple[int, ...]:
    """The messages are read by the chat request's own rules."""
    for name in ("add_special", "add_special_tokens", "parse_special"):
        if tree.get(name) is not None:
            raise InvalidRequest(f"{name} is not for messages: the template decides", param=name)
    request, _ = chat_request.parse(
        msgspec.json.encode({name: value for name, value in tree.items() if value is not None}),
        exchange.services.access,
        request_id=exchange.request_id,
        principal=exchange.principal,
        default_model="",
    )
    services = exchange.services
    return await services.text.tokenize_chat(services.suited(request))


def _read(exchange: Exchange, body: bytes, kind: type[_T]) -> tuple[_T, Any]:
    tree, _ = strict_json.decode(body, exchange.services.access.max_json_depth)
    return strict_json.typed(tree, kind), tree
