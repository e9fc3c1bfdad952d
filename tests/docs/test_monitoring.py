"""The Prometheus rules and the Grafana dashboard are those of the metrics that there are."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.core import GaugeMetricFamily

from tests.docs import monitoring
from tests.docs.monitoring import DASHBOARD_FILE, RULES, RULES_FILE, families, series_of

AGAIN = "run `python -m tests.docs.monitoring`"


@pytest.fixture(scope="module")
def metrics():
    return families()


def test_the_files_are_those_of_the_metrics(metrics):
    assert RULES_FILE.read_text() == monitoring.rules(), AGAIN
    assert DASHBOARD_FILE.read_text() == monitoring.dashboard(metrics), AGAIN


def test_rules_name_only_series_that_exist_and_panels_every_one(metrics):
    existing = series_of(metrics)
    assert {"pilothouse_waiting", "pilothouse_requests_total", "process_open_fds"} <= existing
    for rule in RULES:
        assert set(re.findall(r"pilothouse_\w+", rule.expr)) <= existing, rule.name
    targets = [
        each["targets"][0]["expr"] for each in json.loads(DASHBOARD_FILE.read_text())["panels"] if "targets" in each
    ]
    assert {name for expr in targets for name in re.findall(r"(?:pilothouse|process)_\w+", expr)} == existing
    assert (
        'sum by (model, slo_class, outcome) (rate(pilothouse_requests_total{model=~"$model", region=~"$region"}'
        in str(targets)
    )


def test_a_metric_that_no_row_of_the_dashboard_holds_is_an_error():
    with pytest.raises(LookupError, match="something_new is in no group"):
        list(monitoring.panels([GaugeMetricFamily("something_new", "New.")]))


def test_grafana_s_own_types_know_every_field_of_the_dashboard():
    """Its readers leave out what they do not know, so what is written again has everything that was read."""
    register_default_plugins()
    made = json.loads(DASHBOARD_FILE.read_text())
    for each in made["panels"]:
        assert each["type"] in {"row", "timeseries"}, "one whose options are read too"
    read_again = json.loads(JSONEncoder().encode(Dashboard.from_json(made)))
    assert list(differences(made, read_again)) == []
    made["panels"][1]["targets"][0]["legendformat"] = "odd"
    assert [*differences(made, json.loads(JSONEncoder().encode(Dashboard.from_json(made))))] == [
        ".panels[1].targets[0].legendformat"
    ]


def differences(written, read_again, at=""):
    """Yield the places of *written* that are not the same in *read_again*, which may have more."""
    if isinstance(written, dict) and isinstance(read_again, dict):
        for name, value in written.items():
            yield from differences(value, read_again.get(name), f"{at}.{name}")
    elif isinstance(written, list) and isinstance(read_again, list) and len(written) == len(read_again):
        for number, pair in enumerate(zip(written, read_again, strict=True)):
            yield from differences(*pair, f"{at}[{number}]")
    elif written != read_again:
        yield at


def test_panels_do_not_overlap(metrics):
    taken = set()
    for each in monitoring.panels(metrics):
        at = each["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not taken & cells, each["title"]
        taken |= cells


def test_the_rules_are_yaml_of_prometheus_form():
    read = pytest.importorskip("yaml").safe_load(RULES_FILE.read_text())
    (group,) = read["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [rule.name for rule in RULES]
    assert all(set(rule) == {"alert", "expr", "for", "labels", "annotations"} for rule in group["rules"])


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool (of Prometheus) is not installed")
@pytest.mark.parametrize(
    "command", [("check", RULES_FILE), ("test", Path(__file__).with_name("prometheus-rules-test.yml"))]
)
def test_promtool_accepts_the_rules_and_they_fire(command):
    verb, path = command
    done = subprocess.run(["promtool", verb, "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
