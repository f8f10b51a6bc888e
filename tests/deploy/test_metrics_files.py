"""What `deploy/` and `docs/metrics.md` name is what the server has; every alert rises when it should, and only then."""

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hitsend.serve.usage.metrics import Metrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/hitsend.rules.yml"
RULE_TESTS = ROOT / "deploy/prometheus/hitsend.rules.test.yml"
DASHBOARD = ROOT / "deploy/grafana/hitsend.json"
NAME = re.compile(r"\bhitsend_[a-z_]+")


def families():
    """(name as it is asked for, kind, help) of every metric, also of those without a series yet."""
    text = Metrics().render().decode()
    found = [family for family in text_string_to_metric_families(text) if not family.name.endswith("_created")]
    return {family.name: (family.type, family.documentation) for family in found}


def series_names():
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    return {name + suffix for name, (kind, _) in families().items() for suffix in suffixes[kind]}


def promtool(*words):
    if shutil.which("promtool") is None:
        warnings.warn(
            "PROMETHEUS IS NOT INSTALLED: the rules are not tested (apt-get install prometheus)", stacklevel=1
        )
        pytest.skip("promtool is not installed")
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=120, check=False)


def test_every_alert_rises_when_it_should_and_not_otherwise():
    ran = promtool("test", "rules", str(RULE_TESTS))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_rules_are_rules():
    ran = promtool("check", "rules", "--lint-fatal", str(RULES))
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_alert_goes_untested():
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    tested = RULE_TESTS.read_text()
    raised = set(re.findall(r"alertname: (\w+)\n\s+exp_alerts:\n\s+- exp_labels", tested))
    assert len(alerts) >= 10
    assert alerts == raised


@pytest.mark.parametrize("file", [RULES, RULE_TESTS, DASHBOARD], ids=lambda file: file.name)
def test_what_is_asked_for_is_there(file):
    text = re.sub(r"#.*|description: .*|\"description\": .*", "", file.read_text())
    asked = set(NAME.findall(text))
    assert asked
    assert asked <= series_names()


def test_the_page_lists_every_metric_with_its_meaning():
    rows = re.findall(
        r"^\| `(hitsend_[a-z_]+)` \| (\w+) \| [^|]* \| (.*) \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    listed = {name: (kind, text) for name, kind, text in rows}
    known = {name + "_total" * (kind == "counter"): (kind, text) for name, (kind, text) in families().items()}
    assert listed == known


def test_the_dashboard_asks_its_data_source_only():
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) >= 20
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    assert all(panel["description"] and panel["targets"] for panel in panels)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
