"""A cascade on a labelled sample: the embedded small model first, a stronger stub where it isn't sure enough.

Usage: python -m bench.cascade [--max-wrong 0.1] [--json FILE]
The sample's questions have answers that can be checked. On its even half the threshold is calibrated, as
`hitsend routes calibrate` does; on its odd half the cascade runs with it. Printed: how many drafts were accepted, how
many of those are wrong, and what that half cost beside asking the stronger one alone. The stub knows every answer: its
price is a setting, its quality is not what is measured.
"""

import argparse
import http.client
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.serving import bundled_gguf, hitsend_with
from hitsend.serve.engine.calibrate import Calibration, Labelled, calibrate

CAPITALS = (
    *(("France", "Paris"), ("Japan", "Tokyo"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin")),
    *(("Russia", "Moscow"), ("China", "Beijing"), ("Egypt", "Cairo"), ("Greece", "Athens"), ("Portugal", "Lisbon")),
    *(("Canada", "Ottawa"), ("Australia", "Canberra"), ("Brazil", "Brasília|Brasilia"), ("Kenya", "Nairobi")),
    *(("Sweden", "Stockholm"), ("Norway", "Oslo"), ("Austria", "Vienna"), ("Poland", "Warsaw"), ("Cuba", "Havana")),
    *(("Kazakhstan", "Astana"), ("Bhutan", "Thimphu"), ("Malawi", "Lilongwe"), ("Peru", "Lima"), ("Chad", "N'Djamena")),
)
SUMS = tuple((a, b) for a, b in ((2, 3), (17, 25), (48, 77), (130, 259), (9, 8), (6, 7), (311, 498), (64, 29)))
PRICES = {"small": (0.02, 0.04), "strong": (1.0, 2.0)}
"""USD per million tokens, input and output."""
MAX_TOKENS = 12
STRONG_TOKENS = (40, 4)


class Question(NamedTuple):
    """`expect` is searched for in the answer."""

    text: str
    expect: str
    answer: str


def sample() -> list[Question]:
    """All questions, easy and hard ones mixed."""
    known = [
        Question(f"What is the capital of {country}? Reply with the city only.", rf"\b({city})\b", city.split("|")[0])
        for country, city in CAPITALS
    ]
    sums = [Question(f"What is {a} + {b}? Reply with the number only.", rf"\b{a + b}\b", str(a + b)) for a, b in SUMS]
    return known + sums


class Outcome(NamedTuple):
    """What the odd half came to. Costs in micro-USD."""

    calibration: Calibration
    num_asked: int
    num_accepted: int
    num_wrong_accepted: int
    cost_microusd: int
    strong_alone_microusd: int


def run(questions: Sequence[Question], max_wrong: float, *, threads: int = 2) -> Outcome:
    """Calibrate on every second question, ask the others."""
    answers = {question.text: question.answer for question in questions}
    with stub(answers) as strong, TemporaryDirectory() as folder:
        config = Path(folder) / "hitsend.toml"
        config.write_text(_settings(strong, 0.0))
        with hitsend_with(bundled_gguf(), config, threads) as url:
            found = calibrate([_labelled(url, question) for question in questions[::2]], max_wrong)
        # above 0 nothing is accepted: no threshold, no drafts
        config.write_text(_settings(strong, found.min_logprob if found.min_logprob is not None else 0.0))
        with hitsend_with(bundled_gguf(), config, threads) as url:
            return _cascaded(url, questions[1::2], found)


def _cascaded(url: str, questions: Sequence[Question], found: Calibration) -> Outcome:
    accepted = wrong = cost = alone = 0
    for question in questions:
        answer = _ask(url, "auto", question)
        request_id = answer["hitsend"]["request_id"]
        record = _call(url, "GET", f"/inspect/requests/{request_id}")
        verdict = next(event for event in record["events"] if event["type"] == "judged")
        cost += record["cost_microusd"] + sum(
            event["cost_microusd"] for event in record["events"] if event["type"] == "abandoned"
        )
        accepted += verdict["accepted"]
        wrong += verdict["accepted"] and not _is_good(question, answer)
        alone += _ask(url, "strong", question)["hitsend"]["cost_microusd"]
    return Outcome(found, len(questions), accepted, wrong, cost, alone)


def _settings(strong: str, min_logprob: float) -> str:
    prices = "".join(
        f'[[prices]]\nmodel = "{model}"\ninput = {given}\noutput = {made}\n' for model, (given, made) in PRICES.items()
    )
    return (
        f'engine.alias = "small"\nengine.num_slots = 2\nengine.context = 512\n{prices}'
        f'[[engines]]\nname = "stub"\nbase_url = "{strong}/v1"\nmodels = {{ strong = "strong" }}\n'
        f'[[routes]]\nmodel = "auto"\nengines = ["small", "strong"]\nstrategy = "cascade"\n'
        f"cascade = {{ min_logprob = {min_logprob} }}\n"
    )


def _labelled(url: str, question: Question) -> Labelled:
    answer = _ask(url, "small", question, logprobs=True)
    logprobs = [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]
    return Labelled(sum(logprobs) / len(logprobs), _is_good(question, answer))


def _is_good(question: Question, answer: dict[str, Any]) -> bool:
    choice = answer["choices"][0]
    return choice["finish_reason"] == "stop" and re.search(question.expect, choice["message"]["content"]) is not None


def _ask(url: str, model: str, question: Question, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question.text}]
    body = {"model": model, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0} | fields
    return _call(url, "POST", "/v1/chat/completions", body)


def _call(url: str, method: str, path: str, body: Any = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        found: dict[str, Any] = json.load(connection.getresponse())
    finally:
        connection.close()
    return found


@contextmanager
def stub(answers: dict[str, str]) -> Iterator[str]:
    """A server that knows every answer, in OpenAI's form. Yields its address."""

    class Handler(BaseHTTPRequestHandler):
        """One answer per connection."""

        def do_POST(self) -> None:
            """Two events and an end."""
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = answers[body["messages"][-1]["content"]]
            given, made = STRONG_TOKENS
            usage = {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}
            chunks: list[Any] = [
                {"choices": [{"index": 0, "delta": {"content": text}}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": usage},
            ]
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base's signature
            """Not a word."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def told(found: Outcome) -> str:
    """For people."""
    saved = 1 - found.cost_microusd / found.strong_alone_microusd
    of_half = found.calibration
    return (
        f"calibrated on {of_half.num_samples}: min_logprob {of_half.min_logprob}, {of_half.num_good} good, "
        f"{of_half.num_accepted} accepted, {of_half.num_wrong} of those wrong\n"
        f"asked {found.num_asked}: {found.num_accepted} drafts accepted, {found.num_wrong_accepted} of those wrong; "
        f"cost {found.cost_microusd} micro-USD, the stronger one alone {found.strong_alone_microusd}: {saved:.1%} saved"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-wrong", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run(sample(), options.max_wrong)
    print(told(found))
    if options.json is not None:
        options.json.write_text(json.dumps(found._asdict() | {"calibration": repr(found.calibration)}, indent=1))


if __name__ == "__main__":
    main()
