"""What is sent to an upstream: one body for one request, by its terms.

Enters: a `Request` and the upstream's `Terms`. Leaves: a body, and headers that go with it. Always true: a stream is
always asked for, because only a stream can be left early and billed for what it brought; a field of the caller goes out
under the name that the terms have for it, or not at all (`chat/handover.py` has refused or listed it); salts and
affinities are made from the caller with a secret, so that no client can choose somebody else's. Next: `openai_wire.py`.
"""

import hmac
from typing import Any

import msgspec

from hitsend.core.request import Message, OutputFormat, Request
from hitsend.serve.engine.profiles import THOUGHTS
from hitsend.serve.engine.schema_calls import calls_format, is_forced
from hitsend.serve.engine.terms import Terms

_AFFINE_CHARS = 512
_AFFINE_MESSAGES = 2
"""Of a conversation's beginning, which stays as it is while the conversation grows."""


def encode_body(request: Request, max_tokens: int, terms: Terms) -> bytes:
    """The body to post, asking for the model by the upstream's own name."""
    profile, model = terms.profile, terms.models[request.model]
    body: dict[str, Any] = {"model": model} if profile.names_model else {}
    if request.prompts:
        body["prompt"] = request.prompts[0] if len(request.prompts) == 1 else request.prompts
    else:
        body["messages"] = [_message(message, terms) for message in request.messages]
    body["stream"] = True
    if profile.stream_options is not None:
        body["stream_options"] = profile.stream_options
    body["max_tokens" if request.prompts else terms.max_tokens_field] = max_tokens
    body |= terms.adds
    if terms.sends_priority:
        body["priority"] = request.served_tier
    if profile.salt_field is not None:
        body[profile.salt_field] = _mac(terms.salt, b"cache", [list(request.principal.tenant), request.cache_salt])
    fields = asked(request, names_tool=profile.names_tool)
    if is_forced(request, terms):  # the tools are in its prompt all the same
        form = calls_format(fields["tools"], is_parallel=request.parallel_tool_calls)
        fields |= {"tool_choice": "none", "response_format": form}
    for name, value in fields.items():
        if name in terms.names:
            _put(body, terms.names[name], value)
    if profile.thinking_off is not None and (wanted := _thinks(request, terms)) is not None:
        _put(body, profile.thinking_off, wanted, keeps=True)
    return msgspec.json.encode(body)


def headers_of(request: Request, terms: Terms) -> str:
    """Lines that this request has beside the others' headers, each ended."""
    name = terms.profile.affinity_header
    return "" if name is None else f"{name}: {affinity(request, terms)}\r\n"


def affinity(request: Request, terms: Terms) -> str:
    """The same for all requests of one conversation of one tenant, and telling nothing of it."""
    begin: list[Any] = []
    for message in request.messages[:_AFFINE_MESSAGES]:
        begin.append(_message(message, terms))
        if message.role == "user":  # what comes next is the answer to it, which isn't there in the first round
            break
    begin += [prompt[:_AFFINE_CHARS] for prompt in request.prompts[:1]]
    return _mac(terms.salt, b"affinity", [list(request.principal.tenant), request.model, begin])


def path_of(request: Request, terms: Terms) -> str:
    """Where it is posted."""
    if request.prompts:
        assert terms.profile.completions_path is not None
        return terms.profile.completions_path
    return terms.profile.chat_path.replace("{model}", terms.models[request.model])


def count_body(request: Request, terms: Terms) -> bytes:
    """The same prompt for a `/tokenize` like vLLM's."""
    body: dict[str, Any] = {
        "model": terms.models[request.model],
        "messages": [_message(message, terms) for message in request.messages],
        "add_generation_prompt": request.add_generation_prompt and not request.continue_final_message,
        "continue_final_message": request.continue_final_message,
    }
    if kwargs := template_arguments(request, terms):
        body["chat_template_kwargs"] = kwargs
    if tools := asked(request, names_tool=terms.profile.names_tool).get("tools"):
        body["tools"] = tools
    return msgspec.json.encode(body)


def template_arguments(request: Request, terms: Terms) -> dict[str, Any]:
    """What the upstream's chat template is told, whether or not it says so in the body."""
    effort = request.reasoning_effort
    found = dict(request.template_kwargs) if "chat_template_kwargs" in terms.takes else {}
    if effort is not None and terms.profile.effort_thinks:
        found.setdefault("enable_thinking", effort != "none")
    if (wanted := _thinks(request, terms)) is not None:
        found.setdefault("enable_thinking", wanted)
    return found


def told_tools(request: Request, terms: Terms) -> tuple[dict[str, Any], ...]:
    """The tools that its prompt has in it, also where calls are forbidden, and with empty fields: as vLLM gives them to
    a template."""
    found = asked(request, names_tool=terms.profile.names_tool).get("tools", ())
    return tuple(tool | {"function": {"description": None} | tool["function"]} for tool in found)


def asked(request: Request, *, names_tool: bool = True) -> dict[str, Any]:
    """Every field that the client asked for, by its name here, as far as it says anything.

    Without `names_tool`, a named function is the only one that is told, and one has to be called.
    """
    fields: dict[str, Any] = {
        "n": request.n if request.n > 1 else None,
        "stop": request.stop,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias},
        "logprobs": request.logprobs,
        "top_logprobs": None if request.prompts else request.top_logprobs,
        "reasoning_effort": request.reasoning_effort,
        "include_stop_str_in_output": request.include_stop,
        "stop_token_ids": request.stop_token_ids,
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "chat_template_kwargs": request.template_kwargs,
        "continue_final_message": request.continue_final_message,
        "return_token_ids": request.return_token_ids,
    }
    if request.tools:
        fields |= {"tools": _tools(request), "tool_choice": _choice(request)}
        if not names_tool and len(request.tool_choice.names) == 1:
            only = [tool for tool in fields["tools"] if tool["function"]["name"] in request.tool_choice.names]
            fields |= {"tools": only, "tool_choice": "required"}
    fields |= _format(request.output_format)
    found = {name: value for name, value in fields.items() if value}
    found |= msgspec.to_builtins(request.sampling)
    if request.prompts and request.logprobs:
        found["logprobs"] = request.top_logprobs  # there it is a number
    if request.thinking_token_budget is not None:
        found["thinking_token_budget"] = request.thinking_token_budget
    if request.tools and not request.parallel_tool_calls:
        found["parallel_tool_calls"] = False
    if not request.add_generation_prompt:
        found["add_generation_prompt"] = False
    return found


def _put(body: dict[str, Any], path: str, value: Any, *, keeps: bool = False) -> None:
    """Under a dotted path; objects on the way are made, or copied. `keeps`: what is there stays."""
    *way, name = path.split(".")
    for step in way:
        inner = dict(body.get(step) or {})
        body[step] = inner
        body = inner
    if not (keeps and name in body):
        body[name] = value


def _thinks(request: Request, terms: Terms) -> bool | None:
    """What is said to a model that would think by itself; None: nothing."""
    model, effort = terms.models[request.model].casefold(), request.reasoning_effort
    if not terms.is_thinking_off or not any(name in model for name in terms.profile.thinking_models):
        return None
    return bool(request.thinking_token_budget) if effort is None else effort != "none"


def _mac(salt: bytes, purpose: bytes, facts: Any) -> str:
    return hmac.digest(salt, purpose + b"\0" + msgspec.json.encode(facts), "sha256").hex()


def _message(message: Message, terms: Terms) -> dict[str, Any]:
    """As it came; only, thoughts have the name that they have there, and a call without arguments has those of an empty
    object: some parse what is there."""
    fields = {terms.names.get(name, name) if name == THOUGHTS else name: said for name, said in message.fields.items()}
    if calls := fields.get("tool_calls"):
        fields = fields | {"tool_calls": [_call(call) for call in calls]}
    return {"role": message.role, "content": message.content, **fields}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call if function["arguments"] else call | {"function": function | {"arguments": "{}"}}


def _tools(request: Request) -> list[dict[str, Any]]:
    found = []
    for tool in request.tools:
        # no schema at all is one that OpenAI refuses, though it is what it says to send for a function of nothing
        parameters = tool.parameters or {"type": "object", "properties": {}}
        function: dict[str, Any] = {"name": tool.name, "parameters": parameters}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict:
            function["strict"] = True
        found.append({"type": "function", "function": function})
    return found


def _choice(request: Request) -> Any:
    choice = request.tool_choice
    if choice.mode == "auto":
        return None
    if len(choice.names) == 1:
        return {"type": "function", "function": {"name": choice.names[0]}}
    return choice.mode


def _format(form: OutputFormat | None) -> dict[str, Any]:
    if form is None:
        return {}
    if form.kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if form.kind == "json_schema":
        named = {"name": form.name or "answer", "schema": form.value, "strict": form.strict}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    return {f"structured_outputs.{form.kind}": form.value}
