"""Headless Chromium, driven over its DevTools socket: enough to open a page, run a script, press keys and look."""

import asyncio
import base64
import itertools
import os
import shutil
import signal
import subprocess
from pathlib import Path

import aiohttp

PATIENCE_S = 30.0

FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def find():
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. `problems` collects script errors and CSP violations, `requested` every address that was asked for."""

    def __init__(self, socket):
        self.problems = []
        self.requested = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers = {}
        self._letting = set()
        self._password = None
        self.num_asked = 0
        self._reader = asyncio.create_task(self._read())

    async def _read(self):
        async for message in self._socket:
            document = message.json()
            if "id" in document:
                self._answers.pop(document["id"]).set_result(document)
            elif document["method"] in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                self.problems.append(document["params"])
            elif document["method"] == "Network.requestWillBeSent":
                self.requested.append(document["params"]["request"]["url"])
            elif document["method"].startswith("Fetch."):
                task = asyncio.create_task(self._let_through(document["method"], document["params"]))
                self._letting.add(task)
                task.add_done_callback(self._letting.discard)

    async def log_in(self, password):
        """Answer what the browser would ask a person for. Call before `open`."""
        self._password = password
        await self.call("Fetch.enable", handleAuthRequests=True)

    async def _let_through(self, method, asked):
        if method == "Fetch.authRequired":
            self.num_asked += 1
            answer = {"response": "ProvideCredentials", "username": "me", "password": self._password}
            await self.call("Fetch.continueWithAuth", requestId=asked["requestId"], authChallengeResponse=answer)
        else:
            await self.call("Fetch.continueRequest", requestId=asked["requestId"])

    async def call(self, method, **params):
        number = next(self._ids)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            document = await answer
        assert "error" not in document, document
        return document["result"]

    async def run(self, script):
        """The value of one expression."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script):
        """Wait until an expression is true."""
        async with asyncio.timeout(PATIENCE_S):
            while not (value := await self.run(script)):
                await asyncio.sleep(0.05)
        return value

    async def open(self, url):
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.call(f"{domain}.enable")
        await self.call("Page.bringToFront")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def press(self, key, code):
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    async def resize(self, width, height=800):
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    async def scheme(self, name):
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def screenshot(self, path, height=None):
        """What is on screen; with a height, as much of the page from its top on."""
        clip = {"x": 0, "y": 0, "width": await self.run("innerWidth"), "height": height, "scale": 1} if height else None
        more = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        shot = await self.call("Page.captureScreenshot", optimizeForSpeed=False, **more)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    async def close(self):
        self._reader.cancel()
        await self._socket.close()


class Chromium:
    """The process, with a profile of its own; ended with everything it started."""

    def __init__(self, folder):
        self._folder = folder
        flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={folder}"]
        self._process = subprocess.Popen(
            [find(), *flags, "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def page(self, session):
        """A new tab."""
        told = self._folder / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (told.is_file() and "\n" in told.read_text()):
                await asyncio.sleep(0.05)
        port = told.read_text().split()[0]
        async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as response:
            address = (await response.json())["webSocketDebuggerUrl"]
        return Page(await session.ws_connect(address, max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=5)))

    def close(self):
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
