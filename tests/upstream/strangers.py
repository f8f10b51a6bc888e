"""Streams of servers that call themselves compatible, as bytes, and what is read of them."""

import json

from hitsend.serve.api.blocks import Blocks
from hitsend.serve.engine.openai_wire import ChunkReader

USED = {"prompt_tokens": 7, "completion_tokens": 3}


def chunk(delta=None, reason=None, **fields):
    return {"choices": [{"index": 0, "delta": delta or {}, "finish_reason": reason}], **fields}


def wire(*events):
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


TEXTS = [chunk({"content": text}) for text in "abc"]


def read(*events, reader=None):
    """Text, calls as (id, name, arguments) and end of a stream, the same cut at every event or not at all."""
    reader = reader or ChunkReader(1)
    deltas = [delta for event in events for delta in reader.feed(event if isinstance(event, bytes) else wire(event))]
    deltas += reader.close()
    calls, blocks = {}, Blocks()
    for delta in deltas:
        blocks.feed(delta)  # raises for what comes inside of something else
        for piece in delta.tool_calls:
            if piece.index not in calls:
                assert piece.index == len(calls)
                assert piece.id
                assert piece.name
                calls[piece.index] = [piece.id, piece.name, ""]
            else:
                assert (piece.index, piece.id, piece.name) == (len(calls) - 1, None, None)
            calls[piece.index][2] += piece.arguments
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    return "".join(delta.text for delta in deltas), list(map(tuple, calls.values())), reasons, reader


def call(name=None, arguments=None, call_id=None, **fields):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"function": function, **({"id": call_id} if call_id is not None else {}), **fields}


def called(*pieces):
    return chunk({"tool_calls": list(pieces)})
