"""One line in the log per request, whatever became of it, with its id and without its text."""

import json
import logging

import aiohttp

from hitsend import settings
from hitsend.serve.app import running
from hitsend.serve.logs import set_up_logs
from hitsend.settings import LogSettings
from tests.mock_upstream import mock_upstream


def tree_for(tmp_path, mock):
    prices = settings.UpstreamPrices(input=1.0, output=2.0)
    upstream = settings.UpstreamSettings(name="there", models={"near": "far"}, prices=prices, base_url=mock.url)
    return settings.Settings(
        server=settings.ServerSettings(data_dir=str(tmp_path)),
        engine=settings.EngineSettings(model="none"),
        engines=(upstream,),
    )


def kept(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "hitsend.request" in line]


async def test_each_request_is_one_line_with_its_parts(tmp_path, capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    good = {"model": "near", "messages": [{"role": "user", "content": "CANARY"}], "max_tokens": 5}
    try:
        async with (
            mock_upstream() as mock,
            running(tree_for(tmp_path, mock)) as server,
            aiohttp.ClientSession() as client,
        ):
            set_up_logs(LogSettings(format="json"))
            for name, body in (("one", good), ("two", good | {"stream": True}), ("three", good | {"CANARY": 1})):
                headers = {"x-request-id": name}
                async with client.post(server.base_url + "/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.read()
            lines = kept(capsys)
            set_up_logs(LogSettings(format="pretty"))
            async with client.post(server.base_url + "/v1/chat/completions", json=good) as answer:
                await answer.read()
            pretty = kept(capsys)
            set_up_logs(LogSettings(requests=False))
            async with client.post(server.base_url + "/v1/chat/completions", json=good) as answer:
                await answer.read()
            silent = kept(capsys)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("hitsend.request").setLevel(logging.NOTSET)
    entries = [json.loads(line)["request"] for line in lines]
    assert [entry["request_id"] for entry in entries] == ["one", "two", "three"]
    assert [entry["error"] for entry in entries] == [None, None, "invalid_request"]
    assert [entry["finish_reason"] for entry in entries] == ["stop", "stop", "error"]
    assert entries[0]["model"] == "near"
    assert entries[0]["cost_microusd"] > 0
    assert entries[0]["completion_tokens"] > 0
    assert entries[0]["wall_ms"] > 0
    assert "CANARY" not in "".join(lines + pretty)
    assert len(pretty) == 1
    assert " near: stop, " in pretty[0]
    assert silent == []
