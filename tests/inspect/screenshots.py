"""The pictures of the README and docs, from a real run: python -m tests.inspect.screenshots [--to docs/images].

A server with the bundled model, two callers with keys and budgets, their traffic, and headless Chromium. The pictures
are cut to what they show and stored with few colours, so that each has some tens of kilobytes at most.
"""

import argparse
import asyncio
import json
import pathlib
import subprocess
import sys
import tempfile

import aiohttp

from tests.inspect.chromium import Chromium
from tests.inspect.png import shrink
from tests.served import Served, serving, until

MODEL = "smollm2-135m"
PRICES = json.dumps([{"model": MODEL, "input": 0.45, "output": 3.2, "cached_input": 0.09, "id": "example"}])
WORDS = ("--set", f"prices={PRICES}", "--set", "record.text=true", "--set", "engine.num_slots=8")
WORDS += ("--set", "engine.context=1024", "--set", "engine.wait_timeout_s=300")
QUESTIONS = ("Why is the sky blue?", "What is a prime number?", "Name three rivers.", "What does a compiler do?")
CALLERS = {"alice": ("--org", "acme", "--usd-day", "0.05"), "bob": ("--org", "acme", "--usd-month", "0.5")}


def key_of(name: str, folder: str, *words: str) -> str:
    """Create a key before the server starts."""
    command = [sys.executable, "-m", "hitsend", "keys", "create", "--name", name, "--json", "--data", folder, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return str(json.loads(done.stdout)["key"])


async def talk(session: aiohttp.ClientSession, url: str, key: str, question: str, **fields: object) -> str:
    """One streamed request, read to its end; its id."""
    body = {"messages": [{"role": "user", "content": question}], "stream": True, "temperature": 0} | fields
    headers = {"authorization": f"Bearer {key}"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
        async for _ in answer.content:
            pass
        return str(answer.headers["x-request-id"])


class Album:
    """The open page and where its pictures go."""

    def __init__(self, page, folder: pathlib.Path) -> None:
        self.page = page
        self.folder = folder

    async def take(self, name: str, height: int) -> None:
        path = self.folder / f"{name}.png"
        await self.page.screenshot(path, height)
        shrink(path)
        print(f"{path}: {path.stat().st_size // 1024} KB")

    async def go(self, view: str, ready: str) -> None:
        await self.page.run(f"location.hash = {json.dumps(view)}")
        await self.page.until(f"!!({ready})")


async def photograph(served: Served, keys: dict[str, str], folder: pathlib.Path, profile: pathlib.Path) -> None:
    browser = Chromium(profile)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asks = [
                (keys[name], question, {"max_tokens": 16 + 24 * number})
                for number, question in enumerate(QUESTIONS)
                for name in ("alice", "bob")
            ]
            ids = [await talk(session, served.url, key, question, **fields) for key, question, fields in asks]
            page = await browser.page(session)
            await page.call("Network.enable")
            await page.call("Network.setExtraHTTPHeaders", headers={"x-api-key": keys["admin"]})
            await page.resize(1200, 800)
            await page.open(f"{served.url}/")
            album = Album(page, folder)
            await newcomer(album)
            await records(album, served, keys, ids)
            await live(album, session, served, keys)
            await plans(album)
            await page.close()
    finally:
        browser.close()


async def newcomer(album: Album) -> None:
    page = album.page
    await page.until("document.querySelectorAll('#ask-fields [data-field]').length > 20")
    await page.run("document.querySelector('#ask-field-max_tokens').value = '80'")
    await page.run("document.querySelector('#ask-send').click()")
    await page.until("!!document.querySelector('#talk .ended') && !document.querySelector('#ask-send').disabled")
    await page.run(
        "document.querySelectorAll('#talk .token')[9].dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    await album.take("try", 800)


async def live(album: Album, session: aiohttp.ClientSession, served: Served, keys: dict[str, str]) -> None:
    await album.go("#/live", "document.querySelector('#live-state').innerText.includes('cells')")
    asking = [
        asyncio.create_task(
            talk(
                session,
                served.url,
                keys[("alice", "bob")[number % 2]],
                QUESTIONS[number % 4] * (1 + number % 3),
                max_tokens=200 + 40 * (number % 5),
                ignore_eos=True,
            )
        )
        for number in range(12)
    ]
    await album.page.until("document.querySelectorAll('#live-requests .decode_own').length === 12")
    await asyncio.sleep(6)
    await album.take("live", 900)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def plans(album: Album) -> None:
    await album.page.resize(1200, 800)
    asked = "model=Qwen3.8-27B&gpu=H200&kv-dtype=fp8&max-model-len=32768"
    await album.go(f"#/plan/memory?{asked}", "!document.querySelector('#plan-answer').hidden")
    await album.take("plan", 800)


async def records(album: Album, served: Served, keys: dict[str, str], ids: list[str]) -> None:
    page, admin = album.page, keys["admin"]
    shown = ids[4]
    until(lambda: served.get(f"/inspect/requests/{shown}", admin), lambda record: record["ledger"] is not None)
    await page.resize(1400, 1000)
    await album.go(f"#/request/{shown}", "!document.querySelector('#record').hidden")
    await album.take("request", 1000)
    await page.resize(1200, 800)
    await album.go("#/requests", "document.querySelectorAll('#requests tbody tr').length > 7")
    await page.until("!!document.querySelector('#percentiles table')")
    await album.take("requests", 760)
    await page.run("document.querySelector('#money-by').value = 'key'")
    await album.go("#/money", "document.querySelector('#spent table')")
    await album.take("money", 700)
    await page.scheme("dark")
    await album.go(f"#/compare/{ids[2]}/{ids[4]}", "document.querySelectorAll('#compared .segments').length === 2")
    await album.take("compare-dark", 800)
    await page.scheme("light")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=pathlib.Path, default=pathlib.Path("docs/images"))
    folder = parser.parse_args().to
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as profile:
        keys = {name: key_of(name, data, *words) for name, words in CALLERS.items()}
        keys["admin"] = key_of("admin", data, "--role", "admin")
        with serving(*WORDS, data=pathlib.Path(data)) as served:
            asyncio.run(photograph(served, keys, folder, pathlib.Path(profile)))


if __name__ == "__main__":
    main()
