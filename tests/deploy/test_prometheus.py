"""A real Prometheus scrapes a real server: its rules load, every panel's question has an answer, exemplars arrive."""

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

import pytest

from tests.served import free_port, until

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.model


@contextlib.contextmanager
def prometheus(folder, target):
    """A Prometheus on a free loopback port that scrapes `target` every second, with the rules of `deploy/`."""
    if shutil.which("prometheus") is None:
        warnings.warn("PROMETHEUS IS NOT INSTALLED: scraping is not tested (apt-get install prometheus)", stacklevel=1)
        pytest.skip("prometheus is not installed")
    config = (ROOT / "deploy/prometheus/prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", target).replace("15s", "1s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(ROOT / "deploy/prometheus/hitsend.rules.yml", folder)
    port = free_port()
    words = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage", "--log.level=error"]
    process = subprocess.Popen(words)
    try:
        yield f"http://127.0.0.1:{port}/api/v1/"
    finally:
        process.terminate()
        process.wait(30)


def asked(address, path, **query):
    url = address + path + "?" + urllib.parse.urlencode(query)
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]
    except OSError:  # not up yet, or it doesn't understand the question
        return None


def panels():
    for panel in json.loads((ROOT / "deploy/grafana/hitsend.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "1m").replace("$job", ".*").replace("$model", ".*")
            yield panel["title"], text


def test_prometheus_scrapes_it_and_every_panel_has_an_answer(served, tmp_path):
    answer = served.chat("What is a metric?", max_tokens=8)
    served.wait_idle()
    with prometheus(tmp_path, served.url.removeprefix("http://")) as address:
        query = 'hitsend_requests_judged_total{outcome!=""}'
        found = until(lambda: asked(address, "query", query=query), lambda data: bool(data and data["result"]), 60)
        assert found["result"], "nothing was scraped"
        targets = asked(address, "targets")["activeTargets"]
        assert [target["health"] for target in targets] == ["up"]
        rules = {rule["name"]: rule for group in asked(address, "rules")["groups"] for rule in group["rules"]}
        assert {rule["health"] for rule in rules.values()} <= {"ok", "unknown"}
        assert "HitsendGoodputLoss" in rules
        for title, text in panels():
            assert asked(address, "query", query=text) is not None, f"{title}: {text}"
        since = {"query": "hitsend_request_seconds_bucket", "start": 0, "end": 4_000_000_000}
        shown = until(lambda: asked(address, "query_exemplars", **since), bool, 30)
        ids = {one["labels"]["request_id"] for series in shown for one in series["exemplars"]}
        assert answer["hitsend"]["request_id"] in ids


def test_exemplars_are_for_openmetrics_only(served):
    answer = served.chat("One more.", max_tokens=2)
    served.wait_idle()
    request = urllib.request.Request(served.url + "/metrics", headers={"accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=20) as got:
        kind, text = got.headers["content-type"], got.read().decode()
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")
    assert f'request_id="{answer["hitsend"]["request_id"]}"' in text
    plain = served.text("/metrics")
    assert "request_id" not in plain
    assert "# EOF" not in plain
