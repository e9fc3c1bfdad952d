"""`/api`: the live summary, and how jobs and parts stand, for operators."""

import pytest
from django.utils import timezone

from controlplane.api.routers import system
from controlplane.jobs import schedule
from controlplane.jobs.models import JobRow

pytestmark = pytest.mark.django_db


def test_jobs_of_the_rows_where_no_gateway_runs(sign_in):
    JobRow.objects.create(pk="forecasts", last_success_at=timezone.now(), last_duration_s=0.4)
    JobRow.objects.create(
        pk="plans", last_error="IndexError: 12", last_error_at=timezone.now(), failures_in_a_row=2, failures_total=7
    )
    answer = sign_in("operator").get("system")
    assert answer.status_code == 200
    body = answer.json()
    jobs = {job["name"]: job for job in body["jobs"]}
    assert set(jobs) == set(schedule.periods())
    assert jobs["forecasts"]["state"] == "ok"
    assert jobs["forecasts"]["due_at"] > jobs["forecasts"]["last_success_at"]
    assert (jobs["plans"]["state"], jobs["plans"]["failures_in_a_row"], jobs["plans"]["failures_total"]) == (
        "failing",
        2,
        7,
    )
    assert jobs["plans"]["last_error"] == "IndexError: 12"
    assert jobs["prune-ledger"]["state"] == "never"
    assert body["parts"] == []


class TestSummary:
    def test_it_is_passed_on_as_published_with_an_etag(self, sign_in, monkeypatch, operations):
        monkeypatch.setattr(system, "read_published", lambda key: b'{"seq": 7}')
        caller = sign_in("viewer")
        response = caller.get("summary")
        assert response.json() == {"seq": 7}
        caller.headers = {"If-None-Match": response.headers["ETag"]}
        again = caller.get("summary")
        assert (again.status_code, again.content) == (304, b"")
        monkeypatch.setattr(system, "read_published", lambda key: b'{"seq": 8}')
        assert caller.get("summary").status_code == 200

    def test_without_a_gateway_it_says_so(self, sign_in, settings, operations):
        settings.REDIS_URL = "redis://127.0.0.1:1/0"
        response = sign_in("viewer").get("summary")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "no_summary"
