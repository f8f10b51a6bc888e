"""Files and batches over real sockets, with a scripted engine."""

import asyncio
import contextlib
import sqlite3
import stat

import pytest

from hitsend.core.request import IDLE_TIER
from hitsend.serve.usage.files import MAX_FILES, MAX_UPLOADS
from tests.batching.conftest import batching, line, raw
from tests.drills.scripted import COMPLETION_TOKENS, PROMPT_TOKENS

PRICES = '[{"model":"*","input":0.45,"output":3.2,"batch_discount":0.5}]'
HALF_MICROUSD = (PROMPT_TOKENS * 225_000 + COMPLETION_TOKENS * 1_600_000 + 500_000) // 1_000_000
FAULTY = line("bad", temperature=9)


async def key(client, **fields):
    """A new key; from the first one on, keys are needed."""
    status, made = await client.ask("POST", "/admin/keys", {"name": "k"} | fields)
    assert status in (200, 201), made
    return made["key"]


async def behind_its_back(folder, statement, *values):
    """Change the database of a running server, whose loop is this one: it may be inside a transaction, so it must go
    on meanwhile."""

    def change():
        with contextlib.closing(sqlite3.connect(folder / "hitsend.sqlite3", timeout=20)) as database, database:
            database.execute(statement, values)

    await asyncio.to_thread(change)


async def test_every_line_is_answered_in_order_and_billed_once_at_the_batch_price(tmp_path):
    async with batching(tmp_path, prices=PRICES) as client:
        streamed = line("streamed", stream=True)
        batch = await client.begin(
            line("a"), FAULTY, line("b"), line("none", model="other"), streamed, metadata={"x": "y"}
        )
        assert (batch["object"], batch["metadata"], batch["status"]) == ("batch", {"x": "y"}, "validating")
        batch = await client.until(batch)
        assert batch["request_counts"] == {"total": 5, "completed": 2, "failed": 3}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"] <= batch["expires_at"]
        good, bad = await client.lines(batch["output_file_id"]), await client.lines(batch["error_file_id"])
        assert [each["custom_id"] for each in good] == ["a", "b"]
        assert [each["response"]["body"]["choices"][0]["finish_reason"] for each in good] == ["stop", "stop"]
        assert [each["error"] for each in good] == [None, None]
        assert [(each["custom_id"], each["response"]["status_code"]) for each in bad] == [
            ("bad", 400),
            ("none", 404),
            ("streamed", 400),
        ]
        assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
        assert bad[2]["error"]["message"].startswith("stream:")
        for each in good:
            record = (await client.ask("GET", f"/inspect/requests/{each['response']['request_id']}"))[1]
            assert record["state"] == "finished"
        rows = [row["row"] for row in (await client.ask("GET", "/admin/ledger"))[1]["data"]]
        assert sorted(row["request_id"] for row in rows) == [f"{batch['id']}-1", f"{batch['id']}-3"]
        assert [(row["cost_microusd"], row["price_id"]) for row in rows] == [(HALF_MICROUSD, "settings-batch")] * 2
        assert (await client.ask("GET", "/v1/batches"))[1]["data"] == [batch]
        status, answer = await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        assert (status, answer["error"]["param"]) == (400, "batch_id")


@pytest.mark.slow
async def test_a_file_comes_back_as_it_was_and_goes_for_good(tmp_path):
    async with batching(tmp_path) as client:
        content = bytes(range(256)) * 5000
        status, file = await client.upload(content)
        assert (status, file["bytes"], file["purpose"], file["filename"]) == (200, len(content), "batch", "in.jsonl")
        (kept,) = (tmp_path / "files").iterdir()
        assert (kept.name, stat.S_IMODE(kept.stat().st_mode)) == (file["id"], 0o600)
        assert await client.ask("GET", f"/v1/files/{file['id']}") == (200, file)
        assert await client.ask("GET", f"/v1/files/{file['id']}/content") == (200, content)
        newer = (
            await client.upload(b"x", **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"})
        )[1]
        assert newer["expires_at"] - newer["created_at"] == 3600
        first = (await client.ask("GET", "/v1/files?limit=1"))[1]
        assert (first["data"], first["has_more"]) == ([newer], True)
        rest = (await client.ask("GET", f"/v1/files?limit=1&after={newer['id']}&purpose=batch"))[1]
        assert (rest["data"], rest["has_more"]) == ([file], False)
        assert (await client.ask("GET", "/v1/files?order=asc"))[1]["first_id"] == file["id"]
        assert (await client.ask("DELETE", f"/v1/files/{file['id']}"))[1]["deleted"] is True
        assert not kept.exists()
        for path in (
            file["id"],
            f"{file['id']}/content",
            "file-../../hitsend.sqlite3",
            "%2e%2e/hitsend.sqlite3/content",
        ):
            assert (await client.ask("GET", f"/v1/files/{path}"))[0] == 404


async def test_what_is_no_batch_is_refused_by_its_field(tmp_path):
    async with batching(tmp_path) as client:
        file = (await client.upload(raw(line("a"))))[1]
        for fields, status, param in (
            ({"endpoint": "/v1/messages"}, 400, "endpoint"),
            ({"completion_window": "1h"}, 400, "completion_window"),
            ({"input_file_id": "file-000000000000000000000000"}, 404, "input_file_id"),
            ({"unknown": 1}, 400, "unknown"),
            ({"metadata": {"x": "y" * 513}}, 400, "metadata"),
        ):
            found, answer = await client.create(file["id"], **fields)
            assert (found, answer["error"]["param"]) == (status, param), answer


@pytest.mark.slow
async def test_limits_are_told_with_field_value_and_name(tmp_path):
    limits = {"batches__max_file_bytes": "1000", "batches__stored_bytes": "1500", "batches__max_lines": "2"}
    async with batching(tmp_path, **limits, batches__max_open="1") as client:
        status, answer = await client.upload(b"x" * 1001)
        assert (status, answer["error"]["param"]) == (413, "file")
        assert "limit 1000 (batches.max_file_bytes)" in answer["error"]["message"]
        assert (await client.upload(b"x" * 999))[0] == 200
        status, answer = await client.upload(b"x" * 800)
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
        assert "limit 1500 (batches.stored_bytes)" in answer["error"]["message"]
        assert len(list((tmp_path / "files").iterdir())) == 1
        status, answer = await client.upload(b"x", purpose="fine-tune")
        assert (status, answer["error"]["param"]) == (400, "purpose")
        short = {"method": "POST", "url": "/v1/chat/completions", "body": {}}
        batch = await client.until(await client.begin(*({"custom_id": name} | short for name in "abc")))
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "too_many_lines")
        assert "batches.max_lines" in batch["errors"]["data"][0]["message"]
    async with batching(tmp_path / "other", batches__max_open="1") as client:
        one = await key(client, limits={"requests_per_minute": 1})
        await client.of(one).begin(line("a"), line("b"), line("c"))
        status, file = await client.of(one).upload(raw(line("a")))
        status, answer = await client.of(one).create(file["id"])
        assert (status, "batches.max_open" in answer["error"]["message"]) == (429, True)


async def test_one_key_has_so_many_files_and_uploads_at_once_however_small(tmp_path):
    async with batching(tmp_path) as client:
        admin = client.of(await key(client, role="admin"))
        made = (await admin.ask("POST", "/admin/keys", {"name": "k"}))[1]
        owner, other = client.of(made["key"]), client.of(await key(admin))
        first = (await owner.upload(b""))[1]
        names = "key_id, purpose, file_name, num_bytes, created_at, expires_at"
        await behind_its_back(
            tmp_path,
            f"WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < {MAX_FILES}) "
            f"INSERT INTO files (file_id, {names}) SELECT printf('file-%024d', i), {names} FROM n, files "
            "WHERE file_id = ?",
            first["id"],
        )
        status, answer = await owner.upload(b"")
        assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
        assert f"limit {MAX_FILES}" in answer["error"]["message"]
        assert (await other.upload(b""))[0] == 200
        kept = len(list((tmp_path / "files").iterdir()))
        come = asyncio.Event()

        async def slow():
            yield b"--x\r\n"
            await come.wait()

        uploads = [asyncio.create_task(other.stream(slow())) for _ in range(MAX_UPLOADS)]
        async with asyncio.timeout(20):
            while len(list((tmp_path / "files").iterdir())) < kept + MAX_UPLOADS:
                await asyncio.sleep(0.01)
        status, answer = await other.upload(b"")
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        come.set()
        assert await asyncio.gather(*uploads) == [400] * MAX_UPLOADS
        assert (await other.upload(b""))[0] == 200


@pytest.mark.slow  # the second between two looks at the keys
async def test_another_key_s_files_and_batches_are_like_none(tmp_path):
    async with batching(tmp_path) as client:
        admin = await key(client, role="admin")
        owner, other = [client.of(await key(client.of(admin))) for _ in range(2)]
        batch = await owner.until(await owner.begin(line("a")))
        paths = (f"/v1/files/{batch['input_file_id']}", f"/v1/files/{batch['output_file_id']}/content")
        for path in (*paths, f"/v1/batches/{batch['id']}"):
            status, answer = await other.ask("GET", path)
            missing = await other.ask(
                "GET", path[:-20] + ("0" * 20 if "content" not in path else "000000000000/content")
            )
            assert (status, missing[0]) == (404, 404), path
            assert answer["error"]["code"] == missing[1]["error"]["code"]
            assert (await owner.ask("GET", path))[0] == (await client.of(admin).ask("GET", path))[0] == 200
        assert (await other.ask("POST", f"/v1/batches/{batch['id']}/cancel"))[0] == 404
        assert (await other.ask("DELETE", paths[0]))[0] == 404
        assert (await other.create(batch["input_file_id"]))[0] == 404
        assert (
            (await other.ask("GET", "/v1/files"))[1]["data"] == (await other.ask("GET", "/v1/batches"))[1]["data"] == []
        )
        assert [one["id"] for one in (await client.of(admin).ask("GET", "/v1/batches"))[1]["data"]] == [batch["id"]]


async def slowed(client):
    """A batch of a key that may make one request a minute: one of its lines is done, the others wait."""
    owner = client.of(await key(client, limits={"requests_per_minute": 1}, role="admin"))
    batch = await owner.begin(*(line(name) for name in "abcd"))
    return owner, await owner.until(batch, lambda now: now["request_counts"]["completed"] == 1)


@pytest.mark.slow
async def test_cancelled_what_is_done_stays_and_nothing_more_begins(tmp_path):
    async with batching(tmp_path) as client:
        owner, batch = await slowed(client)
        status, answer = await owner.ask("DELETE", f"/v1/files/{batch['input_file_id']}")
        assert (status, batch["id"] in answer["error"]["message"]) == (400, True)
        status, batch = await owner.ask("POST", f"/v1/batches/{batch['id']}/cancel")
        assert (status, batch["status"]) == (200, "cancelling")
        batch = await owner.until(batch)
        assert (batch["status"], batch["request_counts"]) == ("cancelled", {"total": 4, "completed": 1, "failed": 0})
        assert batch["cancelling_at"] <= batch["cancelled_at"]
        assert len(await owner.lines(batch["output_file_id"])) == 1
        assert batch["error_file_id"] is None
        assert len((await owner.ask("GET", "/admin/ledger"))[1]["data"]) == 1
        assert (await owner.ask("POST", f"/v1/batches/{batch['id']}/cancel"))[0] == 200
        assert (await owner.ask("DELETE", f"/v1/files/{batch['input_file_id']}"))[0] == 200


@pytest.mark.slow
async def test_after_its_window_the_rest_is_in_the_error_file(tmp_path):
    async with batching(tmp_path) as client:
        owner, batch = await slowed(client)
        await behind_its_back(tmp_path, "UPDATE batches SET expires_at = created_at + 0.1")
    async with batching(tmp_path) as client:
        again = type(owner)(client._session, client._base)
        again._headers = owner._headers
        batch = await again.until(batch)
        assert (batch["status"], batch["request_counts"]) == ("expired", {"total": 4, "completed": 1, "failed": 3})
        errors = await again.lines(batch["error_file_id"])
        done = await again.lines(batch["output_file_id"])
        assert sorted(each["custom_id"] for each in (*errors, *done)) == list("abcd")
        assert {each["error"]["code"] for each in errors} == {"batch_expired"}
        assert len((await again.ask("GET", "/admin/ledger"))[1]["data"]) == 1


async def test_nobody_may_use_a_line_s_request_id_before_it(tmp_path):
    async with batching(tmp_path) as client:
        body = line("a")["body"]
        status, answer = await client.ask("POST", "/v1/chat/completions", body, {"x-request-id": "batch_1-1"})
        assert status == 200
        assert answer["hitsend"]["request_id"].startswith("batch_1-1-")
        assert (await client.ask("POST", "/v1/chat/completions", body, {"x-request-id": "own"}))[1]["hitsend"][
            "request_id"
        ] == "own"


@pytest.mark.slow
async def test_a_line_goes_last_and_asks_for_nothing_better(tmp_path):
    async with batching(tmp_path) as client:
        batch = await client.until(
            await client.begin(line("a", service_tier="default"), line("b", service_tier="auto"))
        )
        (refused,) = await client.lines(batch["error_file_id"])
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("a", 403)
        assert f"best is tier {IDLE_TIER}" in refused["error"]["message"]


@pytest.mark.slow
async def test_without_its_key_a_batch_goes_no_further(tmp_path):
    async with batching(tmp_path) as client:
        admin = client.of(await key(client, role="admin"))
        _, made = await admin.ask("POST", "/admin/keys", {"name": "gone", "limits": {"requests_per_minute": 1}})
        batch = await client.of(made["key"]).begin(*(line(name) for name in "abc"))
        await admin.until(batch, lambda now: now["request_counts"]["completed"] == 1)
        assert (await admin.ask("DELETE", f"/admin/keys/{made['id']}"))[0] == 200
        batch = await admin.until(batch)
        assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        assert {each["error"]["code"] for each in await admin.lines(batch["error_file_id"])} == {"invalid_api_key"}
