"""The first token is judged by class: each against its own promise, the worst one named."""

from types import SimpleNamespace
from typing import Any

import pytest

from controlplane.console.live.tiles import TILES, reading
from controlplane.dispatch.monitoring.measures import FLEET, promised_in
from controlplane.dispatch.monitoring.summary import Summary
from controlplane.dispatch.monitoring.windows import Latency, Windows

TARGETS_MS = {"interactive": 1000.0, "patient": 60_000.0, "quiet": 10.0}


@pytest.mark.parametrize(
    ("p95_ms", "worst", "level"),
    [
        ({"interactive": 500.0, "patient": 20_000.0}, "interactive", ""),
        ({"interactive": 500.0, "patient": 50_000.0}, "patient", ""),
        ({"interactive": 500.0, "patient": 70_000.0}, "patient", "warning"),
        ({"interactive": 2500.0, "patient": 70_000.0}, "interactive", "critical"),
        ({"unpromised": 90_000.0}, None, ""),
    ],
)
def test_the_class_that_does_worst_against_its_own_promise_is_shown_judged_and_named(p95_ms, worst, level):
    windows = Windows()
    windows.advance(0.0)
    for slo_class, value in p95_ms.items():
        promised = [windows.group(promised_in(FLEET, slo_class))] if slo_class in TARGETS_MS else []
        windows.latency((windows.group(FLEET), *promised), Latency.TTFT, value)
    measures: Any = SimpleNamespace(windows=windows, service_levels=None, ttft_targets_ms=TARGETS_MS)
    dispatcher: Any = SimpleNamespace(topology=None)
    ttft_class, (_, seen_ms, _), target_ms = Summary(dispatcher, measures, "this test", {})._ttft(FLEET)
    assert (ttft_class, target_ms) == (worst, TARGETS_MS.get(worst))
    assert seen_ms == pytest.approx(p95_ms[worst] if worst else 90_000.0, rel=0.05)
    row = {"ttft_p95_ms": seen_ms, "ttft_slo_ms": target_ms, "ttft_class": ttft_class}
    (tile,) = [one for one in TILES if one.field == "ttft_p95_ms"]
    assert tile.level_of(row) == level
    assert (f"TTFT p95, {worst}" in reading(tile, row)) == (worst is not None)
