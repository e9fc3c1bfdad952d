"""The System page, and the items that jobs, parts, minimums and plans add to Needs attention and the navigation."""

import re
import time
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.problems import Problem, find, read_known
from controlplane.console.live.state import Source, tables_of
from controlplane.jobs import monitor
from controlplane.planning.models import PlanStatus, ScalingPlan
from tests.console.feed import Feed

pytestmark = pytest.mark.django_db


def html_of(client, name="system", **query) -> str:
    answer = client.get(reverse(f"console:{name}"), query)
    assert answer.status_code == 200
    return answer.content.decode()


def found(feed: Feed) -> tuple[Problem, ...]:
    return find(tables_of(feed.summary(time.time())), read_known(timezone.now())).found


def titles(feed: Feed) -> list[str]:
    return [each.title for each in found(feed)]


class TestPage:
    def test_parts_and_jobs_worst_first(self, acting, live, fleet_feed):
        fleet_feed.trouble = {
            "prune-ledger": {"state": "late", "last_success_at": time.time() - 9000},
            "forecasts": {"state": "failing", "failures_in_a_row": 12, "last_error": "IndexError: out of range"},
            "celery": {"state": "down", "detail": "no worker answers", "restarts": 4},
        }
        live.show(fleet_feed)
        html = html_of(acting)
        jobs = re.findall(r'<tr><th scope="row">([^<]+?)\s*</th>', html.partition('id="jobs-panel"')[2])
        assert jobs[:2] == ["Forecasts", "Prune ledger"]
        assert "worst first: 2 late or failing" in html
        assert "IndexError: out of range (12 times in a row)" in html
        assert re.search(r"It was last done 9\d\d\d s ago, and is due every 3600 s\.", html)
        assert "no worker answers" in html
        assert 'data-status="failed"' in html
        assert 'data-topics="system"' in html

    def test_without_a_gateway_it_says_what_is_missing(self, acting, live):
        html = html_of(acting)
        assert "No gateway has reported the state of the parts" in html
        assert "No job is known yet" in html

    def test_while_redis_is_away_this_process_says_what_it_knows(self, acting, live, monkeypatch):
        class Monitor:
            def report(self):
                system = Feed([]).system(time.time())
                system["parts"][1] |= {"state": "down", "detail": "ConnectionError: refused"}
                return system

        monkeypatch.setattr(monitor, "current", Monitor())
        live.source(Source.UNREACHABLE)
        html = html_of(acting)
        assert "this is what this web process sees itself" in html
        assert "ConnectionError: refused" in html
        assert live.feed.latest().problems.found[0].title == "Redis: down"
        assert "Redis: down" in html_of(acting, "overview")


class TestAttention:
    def test_nothing(self, fleet_feed, fleet):
        fleet_feed.rows = fleet_feed.rows[:3]
        assert titles(fleet_feed) == []

    @pytest.mark.parametrize(("ready", "severity"), [(0, "critical"), (1, "warning")])
    def test_fewer_ready_than_the_minimum(self, deployment, fleet_feed, ready, severity):
        deployment.min_instances = 2
        deployment.save()
        rows = [row | {"state": "loading"} for row in fleet_feed.rows[:2]]
        for row in rows[:ready]:
            row["state"] = "ready"
        severities = {each.title: each.severity for each in found(Feed(rows))}
        assert severities[f"{ready} of 2 instances of llama-3.1-8b in US East are ready"] == severity

    def test_an_inactive_deployment_promises_nothing(self, deployment):
        assert read_known(timezone.now()).min_instances == {("llama-3.1-8b", "us-east"): 1}
        deployment.active = False
        deployment.save()
        assert read_known(timezone.now()).min_instances == {}

    def test_plans_that_wait_for_an_operator(self, acting, live, fleet_feed, language_model):
        def plan(minutes, status=PlanStatus.ADVICE):
            until = timezone.now() + timedelta(minutes=minutes)
            ScalingPlan.objects.create(
                model=language_model, strategy="x", made_at=timezone.now(), valid_until=until, status=status
            )

        plan(5), plan(5), plan(-5), plan(5, PlanStatus.REJECTED)
        live.feed._known = read_known(timezone.now())
        live.show(fleet_feed)
        html = html_of(acting, "overview")
        assert html.count("waits for approval") == 2
        assert re.search(r'data-fragment="badge/plans"><span class="count">2<span class="unseen"> to approve', html)
        assert re.search(r'data-fragment="badge/system">\s*</span>', html)

    def test_a_part_that_is_down_and_jobs_that_are_its_fault(self, fleet_feed, fleet):
        fleet_feed.rows = fleet_feed.rows[:3]
        late = {"state": "late", "quiet": True}
        fleet_feed.trouble = {"celery": {"state": "down"}, "forecasts": late, "advance-rollouts": late}
        assert titles(fleet_feed) == ["Celery workers: down"]

    def test_jobs_by_name(self, fleet_feed, fleet):
        fleet_feed.rows = fleet_feed.rows[:3]
        fleet_feed.trouble = {"forecasts": {"state": "failing", "failures_in_a_row": 1, "last_error": "IndexError"}}
        assert titles(fleet_feed) == ["Forecasts: failing"]
