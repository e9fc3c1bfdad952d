"""Weighted targets: requests, errors and medians of each over the last day."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.fleet.models import WeightedTarget
from controlplane.gateway.targets import comparisons

WEIGHTS = {"asked_model": "chat", "model_rule": "weights"}


@pytest.mark.django_db
def test_each_target_has_its_requests_errors_and_medians(make_request):
    now = timezone.now()
    for target, weight, active in (("old", 95, True), ("sql", 5, True), ("gone", 9, False)):
        WeightedTarget.objects.create(name="chat", target=target, weight=weight, active=active)

    def ask(count=1, **values):
        for _ in range(count):
            make_request(**{"arrived_at": now - timedelta(hours=1), "model": "old", **WEIGHTS} | values)

    for ttft_ms in (100.0, 300.0, 200.0):
        ask(ttft_ms=ttft_ms, output_tokens=60)
    ask(ttft_ms=5.0, arrived_at=now - timedelta(hours=25))  # too old
    ask(ttft_ms=5.0, asked_model="other")
    ask(outcome="cancelled", ttft_ms=5.0)
    ask(outcome="failed", status_code=400, ttft_ms=None)  # of its caller
    ask(outcome="failed", status_code=502, ttft_ms=None)
    ask(4, adapter="sql", ttft_ms=50.0)
    ask(model="spare", model_rule="fallback", ttft_ms=5.0, trace=[{"model_rule": "weights", "model": "sql"}])
    old, sql = comparisons(now)
    assert (old.target, old.share, old.heaviest, old.requests, old.error_ratio) == ("old", 0.95, True, 4, 0.25)
    assert (old.medians["ttft_ms"], old.medians["output_tokens"]) == (200.0, 60.0)
    assert (sql.target, sql.heaviest, sql.requests, round(sql.error_ratio, 3)) == ("sql", False, 5, 0.2)
    assert sql.medians["ttft_ms"] == 50.0
    WeightedTarget.objects.filter(target="sql").update(target="new")
    new = comparisons(now)[1]
    assert (new.requests, new.error_ratio, new.medians["ttft_ms"]) == (0, None, None)
