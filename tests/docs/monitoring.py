"""Prometheus rules and a Grafana dashboard, made from the metrics of `/metrics`.

`python -m tests.docs.monitoring` writes `docs/monitoring`; a test compares the two. The dashboard has a panel for each
metric, grouped by its name: what it shows and in which unit follow from the metric's type, labels and name.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import Metric

FOLDER = Path(__file__).parents[2] / "docs" / "monitoring"
RULES_FILE, DASHBOARD_FILE = FOLDER / "prometheus-rules.yml", FOLDER / "grafana-dashboard.json"

GROUPS = {
    "Service levels": ("pilothouse_slo_", "pilothouse_latency_"),
    "Requests": (
        "pilothouse_requests",
        "pilothouse_tokens",
        "pilothouse_errors",
        "pilothouse_unreachable",
        "pilothouse_other_model_requests",
        "pilothouse_active_",
    ),
    "Queues and instances": (
        *(
            "pilothouse_output_",
            "pilothouse_prompt_",
            "pilothouse_running",
            "pilothouse_waiting",
            "pilothouse_held",
            "pilothouse_oldest_wait",
            "pilothouse_instances",
            "pilothouse_heartbeat",
        ),
        *("pilothouse_adapter", "pilothouse_prewarmed", "pilothouse_cached", "pilothouse_lease"),
    ),
    "Capacity and cost": (
        *("pilothouse_demand_", "pilothouse_capacity_", "pilothouse_endpoint_gpus", "pilothouse_gpus"),
        *("pilothouse_cost_", "pilothouse_deferred_", "pilothouse_announced_", "pilothouse_deadline_"),
        *("pilothouse_fleet_", "pilothouse_region_loss_"),
    ),
    "Output lengths": ("pilothouse_length_",),
    "Jobs and parts": ("pilothouse_job_", "pilothouse_part_", "pilothouse_dead_tasks"),
    "Relays": ("pilothouse_relay_",),
    "Ledger and process": ("pilothouse_ledger_", "pilothouse_event_loop_", "pilothouse_info", "process_"),
}
"""Rows of the dashboard: beginnings of the names of their metrics."""
SCRAPED = {"job": "exported_job", "instance": "exported_instance"}
"""Labels that Prometheus renames when it scrapes, since its own have these names."""
UNITS = {"_seconds": "s", "_ratio": "percentunit", "_bytes": "bytes"}
WIDTH, HEIGHT, ACROSS = 8, 7, 3


class Rule(NamedTuple):
    name: str
    expr: str
    hold: str
    severity: str
    summary: str


def burn(window: str) -> str:
    """Return the burn rate over *window* (SRE workbook, chapter 5)."""
    missed = f'sum by (model, slo_class) (rate(pilothouse_slo_requests_total{{met="false"}}[{window}]))'
    judged = f"sum by (model, slo_class) (rate(pilothouse_slo_requests_total[{window}]))"
    allowed = "(1 - max by (slo_class) (pilothouse_slo_objective_ratio))"
    return f"({missed} / {judged}) / on (slo_class) group_left () {allowed}"


def burns(long: str, short: str, threshold: float) -> str:
    return f"{burn(long)} > {threshold:g} and {burn(short)} > {threshold:g}"


MISSED = "{{ $labels.model }} misses {{ $labels.slo_class }} {{ $value | humanize }} times as often as it may"

RULES = (
    Rule("PilothouseSloBurnsFast", burns("1h", "5m", 14.4), "2m", "critical",
         MISSED),
    Rule("PilothouseSloBurns", burns("6h", "30m", 6), "15m", "warning",
         MISSED),
    Rule("PilothouseNoInstanceReady",
         "max by (model, region) (pilothouse_waiting) > 0 and max by (model, region) (pilothouse_instances_ready) == 0",
         "2m", "critical", "Requests wait for {{ $labels.model }} in {{ $labels.region }}, and no instance takes work"),
    Rule("PilothouseRequestsFail",
         'sum by (model) (rate(pilothouse_requests_total{outcome="failed"}[5m]))'
         " / sum by (model) (rate(pilothouse_requests_total[5m])) > 0.05",
         "5m", "critical", "{{ $value | humanizePercentage }} of the requests of {{ $labels.model }} fail"),
    Rule("PilothouseNoOwner", "max(pilothouse_lease_held) == 0 or absent(pilothouse_lease_held)", "1m", "critical",
         "No process owns the regions: nothing is served"),
    Rule("PilothousePartDown", "min by (part) (pilothouse_part_up) == 0", "1m", "critical", "{{ $labels.part }} is down"),
    Rule("PilothouseJobFailing", "max by (exported_job) (pilothouse_job_failing) == 1", "2m", "warning",
         "The last runs of {{ $labels.exported_job }} failed"),
    Rule("PilothouseJobStale", "max by (exported_job) (pilothouse_job_stale) == 1", "2m", "warning",
         "{{ $labels.exported_job }} was not done for two periods"),
    Rule("PilothouseLedgerRowsLost", "increase(pilothouse_ledger_lost_rows_total[10m]) > 0", "0m", "critical",
         "Ledger rows were given up"),
    Rule("PilothouseLedgerHeld", "max(pilothouse_ledger_held_rows) > 1000", "5m", "warning",
         "{{ $value }} ledger rows wait for the database"),
)  # fmt: skip


def families() -> list[Metric]:
    """Return every metric of `/metrics`, as a gateway that has not started shows it."""
    from controlplane.gateway.process import Gateway
    from controlplane.operations import Operations
    from controlplane.planning.execution.loop import ScalingLoop

    return list(Operations(Gateway(ScalingLoop)).registry.collect())


def series_of(metrics: Sequence[Metric]) -> set[str]:
    """Return the names of the series of *metrics*."""
    return {f"{one.name}_total" if one.type == "counter" else one.name for one in metrics}


def rules() -> str:
    lines = ["# Made by `python -m tests.docs.monitoring`.", "groups:", "  - name: pilothouse", "    rules:"]
    for rule in RULES:
        lines += [
            f"      - alert: {rule.name}",
            f"        expr: {json.dumps(rule.expr)}",
            f"        for: {rule.hold}",
            "        labels:",
            f"          severity: {rule.severity}",
            "        annotations:",
            f"          summary: {json.dumps(rule.summary)}",
        ]
    return "\n".join(lines) + "\n"


def group_of(name: str) -> str:
    """Return the row of the dashboard for a metric. Raises LookupError for one that has none."""
    for group, beginnings in GROUPS.items():
        if name.startswith(beginnings):
            return group
    raise LookupError(f"{name} is in no group of tests/docs/monitoring.py")


def panel(metric: Metric, number: int, x: int, y: int) -> dict[str, Any]:
    name = metric.name
    labels = [SCRAPED.get(label, label) for label in getattr(metric, "_labelnames", ())]
    chosen = ", ".join(f'{label}=~"${label}"' for label in ("model", "region") if label in labels)
    shown = [label for label in labels if label != "region"] if len(labels) > 2 and metric.type == "counter" else labels
    by = f" by ({', '.join(shown)})" if shown else ""
    series = f"{name}_total{{{chosen}}}" if metric.type == "counter" else f"{name}{{{chosen}}}"
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "short")
    if metric.type == "counter":
        expr, unit = f"sum{by} (rate({series}[$__rate_interval]))", "cps"
    elif name.endswith(("_timestamp_seconds", "_start_time_seconds")):
        expr = f"time() - max{by} ({series})"
    else:
        expr = f"max{by} ({series})"
    return {
        "id": number,
        "type": "timeseries",
        "title": _title(name),
        "description": metric.documentation,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 5}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": "A",
                "expr": expr,
                "legendFormat": " ".join(f"{{{{{label}}}}}" for label in shown) or _title(name),
            }
        ],
    }


def _title(name: str) -> str:
    words = name.removeprefix("pilothouse_").replace("_timestamp_seconds", "_age").replace("_start_time", "_age")
    words = re.sub(r"_(seconds|ratio|bytes)$", "", words).replace("_", " ")
    words = words.strip().capitalize()
    for name in ("SLO", "GPUs", "USD"):
        words = re.sub(rf"\b{name}\b", name, words, flags=re.IGNORECASE)
    return words


def panels(metrics: Sequence[Metric]) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for group in GROUPS:
        yield {"id": number, "type": "row", "title": group, "collapsed": False, "panels": [],
               "gridPos": {"x": 0, "y": y, "w": WIDTH * ACROSS, "h": 1}}  # fmt: skip
        number, y = number + 1, y + 1
        members = [one for one in metrics if group_of(one.name) == group]
        for at, metric in enumerate(members):
            yield panel(metric, number, at % ACROSS * WIDTH, y + at // ACROSS * HEIGHT)
            number += 1
        y += -(-len(members) // ACROSS) * HEIGHT


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard(metrics: Sequence[Metric]) -> str:
    choices = [_choice(name, f"label_values(pilothouse_running, {name})") for name in ("model", "region")]
    made = {
        "title": "Pilothouse",
        "uid": "pilothouse",
        "tags": ["pilothouse", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, *choices]},
        "panels": list(panels(metrics)),
    }
    return json.dumps(made, indent=1) + "\n"


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    import django

    django.setup()
    FOLDER.mkdir(exist_ok=True)
    RULES_FILE.write_text(rules())
    DASHBOARD_FILE.write_text(dashboard(families()))


if __name__ == "__main__":
    main()
