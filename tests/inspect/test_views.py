"""The page in a real browser before a real server with the real model: every view, at every width, in both schemes."""

import asyncio
import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from hitsend.plan.facts import shipped_facts
from tests.inspect.chromium import Chromium, find
from tests.served import serving, until

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find() is None, reason="NO CHROMIUM, THE PAGE IS NOT TESTED: apt-get install chromium"),
]
FINDINGS = (Path(__file__).parent / "accessibility.js").read_text("utf-8")
FAULTS = """document.querySelector("main").append(Object.assign(document.createElement("div"), {id: "faults"}));
for (const [tag, changes] of [["button", {}], ["h6", {textContent: "deep"}], ["input", {}],
    ["table", {textContent: "x"}], ["p", {textContent: "pale", className: "faint"}]]) {
  const made = Object.assign(document.createElement(tag), changes);
  if (tag === "p") made.style.color = "#999999";
  document.querySelector("#faults").append(made);
}"""
DECODED = """[...document.querySelectorAll("#live-requests .decode_own")]
  .reduce((sum, bar) => sum + Number(bar.getAttribute("width")), 0)"""
NUM_CONCURRENT = 16
MEMORY = "model=Qwen3.8-27B&gpu=H200&kv-dtype=fp8&max-model-len=32768&prefix-caching=true"
SUMS = """(() => {
  const ms = (row) => parseFloat(row.cells[2].textContent) * (row.cells[2].textContent.endsWith(" ms") ? 1 : 1000);
  const rows = [...document.querySelectorAll("#record .segments tr")];
  return [rows.slice(0, -1).reduce((sum, row) => sum + ms(row), 0), ms(rows.at(-1)), rows.length];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Chromium(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
async def page(browser):
    async with aiohttp.ClientSession() as session:
        page = await browser.page(session)
        yield page
        await page.close()


async def go(page, view, ready):
    await page.run(f"location.hash = {json.dumps(view)}")
    await page.until(f"!!({ready})")


async def text_of(page, selector):
    return await page.run(f"document.querySelector({json.dumps(selector)}).innerText")


async def ask(page, question, **fields):
    """Send from the form and wait for the answer's end."""
    await page.until("document.querySelectorAll('#ask-fields [data-field]').length > 20")
    await page.run(f"document.querySelector('#ask-text').value = {json.dumps(question)}")
    for name, value in fields.items():
        await page.run(f"document.querySelector('#ask-field-{name}').value = {json.dumps(value)}")
    ended = await page.run("document.querySelectorAll('#talk .ended').length")
    await page.run("document.querySelector('#ask-send').click()")
    await page.until(f"document.querySelectorAll('#talk .ended').length > {ended}")


async def test_a_newcomer_asks_and_sees_where_the_time_went(served, page):
    await page.open(f"{served.url}/")
    assert await text_of(page, "nav [aria-current]") == "Try it"
    await ask(page, "Count: one, two, three.", max_tokens="12", ignore_eos="true", temperature="0")
    await page.until(
        "!!document.querySelector('#try-waterfall .total') && !document.querySelector('#ask-send').disabled"
    )
    assert await page.run("document.querySelectorAll('#talk .token').length") == 12
    await page.until("document.querySelector('#try-waterfall').innerText.includes('12 tokens')")
    await page.run(
        "document.querySelector('#talk .token').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    assert await page.run("document.querySelectorAll('#talk .told .top li').length") == 5
    fields = await page.run("[...document.querySelectorAll('[data-field]')].map((one) => one.dataset.field)")
    body = served.get("/openapi.json")["components"]["schemas"]["ChatBody"]["properties"]
    sampling = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "typical_p", "dry_multiplier", "stop")
    assert set(sampling) <= set(fields) < set(body)
    await page.run("document.querySelector('#ask-thinking').value = 'off'")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    await page.run(f"document.querySelector('#ask-tools').value = {json.dumps(json.dumps(tools))}")
    await ask(page, "Again.", max_tokens="4")
    await page.until("!document.querySelector('#ask-send').disabled")
    to = await page.run("document.querySelector('#try-waterfall a').getAttribute('href')")
    rendered = next(one for one in served.record(to.rpartition("/")[2])["events"] if one["type"] == "rendered")
    assert rendered["template_kwargs"] == {"enable_thinking": False}
    await ask(page, "Again.", temperature="9")
    assert "temperature" in await text_of(page, "#ask-error")
    assert await page.run("document.querySelector('#ask-field-temperature').ariaInvalid") == "true"
    refused = [each for each in page.problems if "400" not in json.dumps(each)]
    assert refused == []


async def test_everything_about_one_request_and_another_beside_it(served, page):
    request = {"max_tokens": 24, "temperature": 0, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    ids = [served.chat(question, **request)["hitsend"]["request_id"] for question in ("Say hello.", "Say bye.")]
    for each in ids:
        until(lambda each=each: served.record(each), lambda found: found["ledger"] is not None)
    await page.open(f"{served.url}/inspect#/request/{ids[0]}")
    await page.until("!document.querySelector('#record').hidden")
    total, wall, rows = await page.run(SUMS)
    assert rows > 4
    assert total == pytest.approx(wall, rel=0.01, abs=0.05 * rows)
    shown = await text_of(page, "#record")
    for part in ("decoding", "from the cache", "Held $", "Settled once", "max messages", "seed", "<|im_start|>"):
        assert part in shown, part
    assert await text_of(page, "#record .role") == "user"
    assert await page.run("document.querySelectorAll('#record .control').length") >= 4
    output = served.record(ids[0])["usage"]["completion_tokens"]
    scored = "[aria-label^='Tokens of the answer'] .token"
    assert await page.run(f"document.querySelectorAll({json.dumps(scored)}).length") == output
    unscored = served.chat("Say ho.", max_tokens=6, temperature=0, ignore_eos=True)["hitsend"]["request_id"]
    await go(page, f"#/request/{unscored}", f"document.querySelectorAll({json.dumps(scored)}).length === 6")
    colours = await page.run(f"[...document.querySelectorAll({json.dumps(scored)})].map((one) => one.className)")
    ids_said = served.record(unscored)["output_token_ids"]["0"]
    assert colours[:6] == [f"token i{one % 6}" for one in ids_said[:6]], "by id: nobody asked for chances"
    await go(page, f"#/compare/{ids[0]}/{ids[1]}", "document.querySelectorAll('#compared .segments').length === 2")
    assert "decode" in await text_of(page, "#compared")
    await go(page, "#/requests?min_wall_ms=0.5", "document.querySelectorAll('#requests tbody tr').length >= 2")
    await page.until("!!document.querySelector('#percentiles a[href^=\"#/request/\"]')")
    await page.run("document.querySelector('#percentiles a[href^=\"#/request/\"]').click()")
    await page.until("!document.querySelector('#view-request').hidden && !document.querySelector('#record').hidden")
    await go(page, "#/requests?finish_reason=tool_calls&name=nobody", "!document.querySelector('#none').hidden")
    await go(page, "#/money", "document.querySelector('#spent table')")
    spent = served.get("/inspect/usage?by=day")
    assert f"{spent['totals']['requests']:,} requests" in await text_of(page, "#spent")
    assert page.problems == []
    assert [url for url in page.requested if not url.startswith((served.url, "data:"))] == []


async def test_live_shows_sixteen_requests_at_once_growing(served, page):
    await page.open(f"{served.url}/inspect#/live")
    await page.until("document.querySelector('#live-state').innerText.includes('tokens/s')")
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 800, "ignore_eos": True, "stream": True}

    async def keep_asking(session):
        async with session.post(f"{served.url}/v1/chat/completions", json=body) as answer:
            async for _ in answer.content:
                pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        asking = [asyncio.create_task(keep_asking(session)) for _ in range(NUM_CONCURRENT)]
        try:
            await page.until(f"document.querySelectorAll('#live-requests tbody tr').length === {NUM_CONCURRENT}")
            await page.until("document.querySelectorAll('#live-requests .waits').length > 0")
            await page.until("document.querySelectorAll('#live-batch .bar rect').length > 2")
            before = await page.until(DECODED)
            await page.until(f"{DECODED} > {before}")
            assert "sequences" in await text_of(page, "#live-step")
            assert await page.run(FINDINGS) == []
        finally:
            for task in asking:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*asking, return_exceptions=True)
    await page.until("!document.querySelector('#live-none').hidden")
    assert page.problems == []


async def test_every_view_fits_reads_and_is_usable_without_a_mouse(served, page):
    first = served.chat("Say hi.", max_tokens=8, logprobs=True)["hitsend"]["request_id"]
    second = served.chat("Say ho.", max_tokens=8)["hitsend"]["request_id"]
    views = {
        "#/try": "document.querySelectorAll('#ask-fields [data-field]').length > 20",
        "#/live": "document.querySelector('#live-state').innerText.includes('cells')",
        "#/requests": "document.querySelectorAll('#requests tbody tr').length > 1",
        f"#/request/{first}": "!document.querySelector('#record').hidden",
        f"#/compare/{first}/{second}": "document.querySelectorAll('#compared .segments').length === 2",
        "#/money": "document.querySelector('#spent table')",
        f"#/plan/memory?{MEMORY}": "!document.querySelector('#plan-answer').hidden",
    }
    await page.open(f"{served.url}/")
    await ask(page, "Hello.", max_tokens="8")
    await page.run("document.querySelector('#ask-options').open = true")
    papers = set()
    for view, ready in views.items():
        await go(page, view, ready)
        await page.run("document.querySelectorAll('main details').forEach((each) => { each.open = true; })")
        for scheme in ("light", "dark"):
            await page.scheme(scheme)
            papers.add(await page.run("getComputedStyle(document.body).backgroundColor"))
            assert await page.run(FINDINGS) == [], (view, scheme)
        for width in (360, 800, 1440, 2560):
            await page.resize(width)
            assert await page.run("document.scrollingElement.scrollWidth <= innerWidth"), (view, width)
    assert len(papers) == 2
    await page.run(FAULTS)
    assert len(await page.run(FINDINGS)) >= 5, "the check finds what is wrong"
    await page.run("document.querySelector('#faults').remove()")
    await go(page, "#/try", views["#/try"])
    await page.run("document.querySelector('nav a').focus()")
    seen = []
    for _ in range(14):
        await page.press("Tab", 9)
        seen.append(await page.run("[...document.querySelectorAll('*')].indexOf(document.activeElement)"))
    assert seen == sorted(set(seen)), "the focus follows the order of the page"
    assert page.problems == []


async def test_a_plan_is_asked_by_keyboard_and_its_address_can_be_given_away(served, page):
    await page.open(f"{served.url}/inspect#/plan/memory?{MEMORY}")
    await page.until("!document.querySelector('#plan-answer').hidden")
    command = await text_of(page, "#plan-command")
    assert "--max-model-len 32768 --prefix-caching" in command
    told = await asyncio.to_thread(
        subprocess.check_output, [sys.executable, "-m", *shlex.split(command)], text=True, timeout=60
    )
    assert await page.run("document.querySelector('#plan-text').textContent") == told.rstrip("\n")
    assert json.loads(await page.run("document.querySelector('#plan-json').textContent"))["fits"] is True
    assert await page.run("document.querySelector('#plan-others').open"), "a field of the address is to be seen"
    await go(page, "#/plan/cost", "document.querySelector('#plan-field-price')")
    await page.run("document.querySelector('#plan-field-price').focus()")
    for typed in ("0.45/3.20", "30000", "1200", "400"):
        await page.call("Input.insertText", text=typed)
        await page.press("Tab", 9)
    await page.press("Enter", 13)
    await page.until("document.querySelector('#plan-text').textContent.includes('54.60 USD gross')")
    assert await page.run("location.hash") == "#/plan/cost?price=0.45/3.20&requests=30000&input=1200&output=400"
    assert page.problems == []
    await go(page, "#/plan/train?params=7B&zero=7", "!document.querySelector('#plan-error').hidden")
    assert await page.run("document.querySelector('#plan-field-zero').ariaInvalid") == "true"
    assert await page.run("document.querySelector('#plan-answer').hidden")
    await go(page, "#/plan/memory?gpu=H100", "document.querySelector('#plan-paste')")
    config = next(one.config for one in shipped_facts().models if one.name.endswith("Qwen3-8B"))
    await page.run(f"document.querySelector('#plan-config').value = {json.dumps(json.dumps(config))}")
    await page.run("document.querySelector('#plan-form button').click()")
    await page.until("document.querySelector('#plan-text').textContent.startsWith('pasted on vllm')")
    assert await page.run("document.querySelector('[data-pasted=calibrate]').hidden")
    await go(page, "#/plan/speed?gpu=H100&model=Qwen3-8B&batch=16", "!document.querySelector('#plan-answer').hidden")
    bench = dict.fromkeys(("completed", "total_input_tokens", "total_output_tokens", "mean_ttft_ms"), 100)
    for measured, shown in (
        (bench, "document.querySelector('#plan-calibrate').ariaInvalid === 'true'"),
        (
            bench | {"mean_tpot_ms": 9, "duration": 9, "total_output_tokens": 12_800},
            "document.querySelector('#plan-text').textContent.includes('calibration: ')",
        ),
    ):
        await page.run("document.querySelector('#plan-config').value = ''")
        await page.run(f"document.querySelector('#plan-calibrate').value = {json.dumps(json.dumps(measured))}")
        await page.run("document.querySelector('#plan-form button').click()")
        await page.until(shown)


def made_key(folder, name):
    command = [sys.executable, "-m", "hitsend", "keys", "create", "--name", name, "--json", "--data", str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)["key"]


async def names_of(page, selector, count):
    await page.until(f"document.querySelectorAll({json.dumps(selector)}).length === {count}")
    return await page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)")


async def test_a_caller_sees_its_own_and_a_watched_server_stops(page, tmp_path):
    ann, bob = made_key(tmp_path, "ann"), made_key(tmp_path, "bob")
    words = ("--set", "engine.num_slots=1", "--set", "engine.context=256", "--set", "server.drain_s=600")
    with serving(*words, data=tmp_path) as served:
        body = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
        for key in (ann, bob, bob):
            assert served.post("/v1/chat/completions", body, key)[0] == 200
        await page.log_in(ann)
        await page.open(f"{served.url}/inspect")
        assert await names_of(page, "#requests tbody td:nth-child(3)", 1) == ["ann"]
        await page.run(f"document.querySelector('#key').value = {json.dumps(bob)}")
        await page.run("document.querySelector('#key-form button').click()")
        assert await names_of(page, "#requests tbody td:nth-child(3)", 2) == ["bob", "bob"]
        await go(page, "#/money", "document.querySelector('#spent .sum')")
        assert "2 requests" in await text_of(page, "#spent .sum")
        asked = page.num_asked
        await page.run("sessionStorage.setItem('hitsend-key', 'hs_wrong'); location.hash = '#/live'")
        await page.until("!document.querySelector('#key-form').hidden")
        assert page.num_asked == asked == 1, (
            "the browser asks once; a wrong key of the page's own is the page's to ask for"
        )
        await page.run("document.querySelector('#key-forget').click()")
        await page.until("document.querySelector('#live-state').innerText.includes('not shown')")
        served.process.terminate()
        assert await asyncio.to_thread(served.process.wait, 60) == 0
        await page.until("document.querySelector('#status').textContent.includes('trying again')")
