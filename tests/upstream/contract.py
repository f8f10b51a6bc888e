"""What holds for every engine: the same request, the same shapes and counts, whatever stands behind a model's name."""

import json

from hitsend.testing import check_stream

SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
WHERE = {"type": "object", "properties": {"at": {"enum": ["it"]}}, "required": ["at"], "additionalProperties": False}
LOOK = {"type": "function", "function": {"name": "look", "parameters": WHERE, "strict": True}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "look"}}
THINK = {"chat_template_kwargs": {"enable_thinking": True}}
HOT = {"temperature": 1.0, "max_tokens": 4, "ignore_eos": True}


async def told(gate, model, **fields):
    status, body, answer = await gate.answer(**{"model": model, "max_tokens": 32} | fields)
    return status, body, answer


async def said(gate, model, **fields):
    """A whole answer that has to succeed; its one choice, and its usage."""
    status, body, _ = await told(gate, model, **{"temperature": 0} | fields)
    assert status == 200, (model, fields, body)
    return body["choices"][0], body["usage"]


async def keeps_the_contract(gate, model):
    """Shapes only: what holds for every engine, the embedded one too."""
    status, body, answer = await told(gate, model, temperature=0, max_tokens=6)
    assert (status, body["object"], body["model"]) == (200, "chat.completion", model)
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    assert body["hitsend"]["request_id"] == answer.headers["x-request-id"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, text, _ = await told(gate, model, temperature=0, max_tokens=6, **options)
    seen = check_stream(text.encode(), n=1, include_usage=True)
    assert seen.finish_reasons == {0: body["choices"][0]["finish_reason"]}
    _, body, _ = await told(gate, model, logprobs=True, top_logprobs=0, max_tokens=3)
    first = body["choices"][0]["logprobs"]["content"][0]
    assert first.keys() == {"token", "logprob", "bytes", "top_logprobs"}
    status, body, _ = await told(gate, model, temperature=9)
    assert (status, body["error"]["param"], body["error"].keys()) == (
        400,
        "temperature",
        {"message", "type", "param", "code"},
    )


async def counts(gate, model, can):
    """Prompts are known to the token before anything is held; every row is what the engine said."""
    bodies = [{}, THINK, {"tools": [LOOK, WAIT]}]
    bodies += [{"reasoning_effort": "high"}] if "effort" in can else []
    for fields in bodies if "count" in can else ():
        asked = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 2, **fields}
        async with gate.session.post(f"{gate.url}/v1/estimate", json=asked | {"model": model}) as answer:
            estimate = await answer.json()
        status, body, _ = await told(gate, model, **asked)
        assert (status, body["usage"]["prompt_tokens"]) == (200, estimate["prompt_tokens"]), fields
        row = (await gate.record(body["hitsend"]["request_id"]))["ledger"]
        assert row["completion_tokens"] == body["usage"]["completion_tokens"]
        assert row["is_estimate"] is False
    _, body, _ = await told(gate, model, n=2, **HOT)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 8, body
    choice, usage = await said(gate, model, logprobs=True, top_logprobs=2, max_tokens=4, ignore_eos=True)
    assert len(choice["logprobs"]["content"]) == usage["completion_tokens"] == 4
    assert {len(one["top_logprobs"]) for one in choice["logprobs"]["content"]} == {2}


async def samples(gate, model):
    """Seeds, biases, stop strings, and prompts that can't fit."""
    texts = [(await said(gate, model, seed=7, **HOT))[0]["message"]["content"] for _ in range(2)]
    assert texts[0] == texts[1]
    choice, _ = await said(gate, model, logit_bias={"28": 100}, max_tokens=3)
    assert choice["message"]["content"] == ",,,"
    choice, _ = await said(gate, model, stop=["e"], max_tokens=12)
    assert (choice["finish_reason"], "e" in choice["message"]["content"]) == ("stop", False)
    status, body, _ = await told(gate, model, messages=[{"role": "user", "content": "hi " * 9000}])
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "context_length_exceeded", "messages")


async def forms(gate, model, can):
    """Answers that have to look like something."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    choice, _ = await said(gate, model, response_format=form)
    assert json.loads(choice["message"]["content"]) == {"a": "x"}
    for kind, value, wanted in (("regex", "7{3}", "777"), ("choice", ["yes"], "yes"), ("lark", 'start: "abc"', "abc")):
        asked = {"temperature": 0, "max_tokens": 8, "structured_outputs": {kind: value}}
        status, body, _ = await told(gate, model, **asked)
        if kind in can:
            assert (status, body["choices"][0]["message"]["content"]) == (200, wanted), kind
        else:
            assert (status, body["error"]["param"]) == (400, "structured_outputs")


async def thinks_and_calls(gate, model, can):
    """Thoughts under both names and within their budget; the function that was named, and no other one."""
    if "thinking" in can:
        choice, usage = await said(gate, model, thinking_token_budget=6, ignore_eos=True, max_tokens=16, **THINK)
        message = choice["message"]
        assert message["reasoning"] == message["reasoning_content"]
        assert message["content"] is not None, "the budget was passed over"
        assert usage["completion_tokens"] == 16
    if "tools" in can:
        asked = {"tools": [WAIT, LOOK], "tool_choice": NAMED, "max_tokens": 64}
        choice, _ = await said(gate, model, **asked)
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "look")
        assert json.loads(call["function"]["arguments"]) == {"at": "it"}
        _, text, _ = await told(gate, model, temperature=0, stream=True, **asked)
        assert check_stream(text.encode(), n=1, include_usage=False).finish_reasons == {0: "tool_calls"}


async def gives_ids(gate, model, can):
    """`return_token_ids`: whole, streamed, in the record; or refused by its name."""
    asked = {"return_token_ids": True, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
    status, body, _ = await told(gate, model, **asked)
    if "ids" not in can:
        assert (status, body["error"]["param"]) == (400, "return_token_ids")
        return
    ids, usage = body["choices"][0]["token_ids"], body["usage"]
    assert (len(body["prompt_token_ids"]), len(ids)) == (usage["prompt_tokens"], 4)
    record = await gate.record(body["hitsend"]["request_id"])
    assert record["output_token_ids"] == {"0": ids}
    assert record["prompt_token_ids"] == {"0": body["prompt_token_ids"]}
    _, text, _ = await told(gate, model, stream=True, **asked)
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    streamed = [one for chunk in chunks for choice in chunk["choices"] for one in choice.get("token_ids", ())]
    assert streamed == ids
    assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [body["prompt_token_ids"]]
    completion = asked | {"model": model, "prompt": [body["prompt_token_ids"], [19556, 28]]}
    async with gate.session.post(f"{gate.url}/v1/completions", json=completion) as answer:
        first, second = (await answer.json())["choices"]
    assert (first["prompt_token_ids"], first["token_ids"]) == (body["prompt_token_ids"], ids)
    assert len(second["token_ids"]) == 4


async def completes(gate, model):
    """Texts and ids go on where they end."""
    asked = {"model": model, "prompt": ["Hello", "Bye"], "max_tokens": 3, "temperature": 0, "logprobs": 1}
    async with gate.session.post(f"{gate.url}/v1/completions", json=asked) as answer:
        body = await answer.json()
    assert [choice["index"] for choice in body.get("choices", ())] == [0, 1], body
    assert body["usage"]["completion_tokens"] == sum(len(one["logprobs"]["tokens"]) for one in body["choices"])


async def keeps_all_of_it(gate, model, can):
    """Everything above."""
    await keeps_the_contract(gate, model)
    await counts(gate, model, can)
    await samples(gate, model)
    await forms(gate, model, can)
    await thinks_and_calls(gate, model, can)
    await gives_ids(gate, model, can)
    await completes(gate, model)
