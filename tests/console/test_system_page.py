"""The System page, and the items that jobs, parts, minimums and plans add to Needs attention and the navigation."""

import re
import time
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.problems import Problem, find, read_known
from controlplane.console.formats import NONE
from controlplane.console.live.state import Source, tables_of
from controlplane.events.models import Event
from controlplane.fleet.models import Model, Owner
from controlplane.jobs import monitor
from controlplane.planning.models import PlanStatus, ScalingPlan
from tests.console.feed import Feed

pytestmark = pytest.mark.django_db


def html_of(client, name="system", **query) -> str:
    answer = client.get(reverse(f"console:{name}"), query)
    assert answer.status_code == 200
    return answer.content.decode()


def found(feed: Feed) -> tuple[Problem, ...]:
    return find(tables_of(feed.summary(time.time())), read_known(timezone.now()))


def relay(host: str, pid: int, **values) -> dict:
    figures = {"active": 12, "streaming": 8, "busy_ratio": 0.31, "ledger_held": 5}
    seen = {"started_at": time.time() - 60, "seen_at": time.time()}
    return {"name": f"{host}:{pid}:a1b2", "host": host, "pid": pid, "state": "serving", **figures, **seen, **values}


def text_of(answer) -> str:
    return " ".join(re.sub(r"<[^>]*>", " ", answer.content.decode()).split())


@pytest.fixture
def owner_row():
    def make(number: int = 1, **values) -> Owner:
        given = {"token": "t", "epoch": 4, "address": "tcp://gpu-a:8201", **values}
        expires_at = given.pop("expires_at", timezone.now() + timedelta(minutes=1))
        return Owner.objects.create(role=f"shard {number}", expires_at=expires_at, **given)

    return make


def titles(feed: Feed) -> list[str]:
    return [each.title for each in found(feed)]


class TestPage:
    def test_parts_and_jobs_worst_first(self, acting, live, fleet_feed):
        fleet_feed.trouble = {
            "prune-ledger": {"state": "late", "last_success_at": time.time() - 9000},
            "forecasts": {"state": "failing", "failures_in_a_row": 12, "last_error": "IndexError: out of range"},
            "flush-ledger": {"failures_total": 1, "last_error": "IndexError: once"},
            "celery": {"state": "down", "detail": "no worker answers", "restarts": 4},
        }
        live.show(fleet_feed)
        html = html_of(acting)
        jobs = re.findall(
            r'<tr><th scope="row">([^<]+?)\s*</th>', html.partition('id="jobs-panel"')[2].partition("<summary>")[0]
        )
        assert jobs[:2] == ["Forecasts", "Prune ledger"]
        assert len(jobs) == 3, "what has failed before stands before all that is well, which is folded"
        assert re.search(r"<summary>\d+ jobs OK</summary>", html)
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
        live.judge()
        assert "Redis: down" in html_of(acting, "overview")


class TestProcesses:
    def test_one_that_does_all_is_a_line_and_no_table(self, acting, live, fleet_feed, owner_row):
        owner_row(name="gpu-a:17:a1b2")
        fleet_feed.relays = [relay("gpu-a", 17)]
        live.show(fleet_feed)
        text = text_of(acting.get(reverse("console:system")))
        assert "One process, gpu-a:17:a1b2 , carries all requests and decides about all models" in text
        assert "Stands by" not in text

    def test_none(self, acting, live, fleet_feed):
        live.show(fleet_feed)
        assert "No process carries requests" in html_of(acting)

    def test_relays_and_the_owners_of_shards(self, acting, live, fleet_feed, owner_row, language_model):
        owner_row(name="gpu-a:18", wanted_at=timezone.now())
        owner_row(2, name="gpu-b:19")
        owner_row(3, name="gpu-b:19", expires_at=timezone.now())
        fleet_feed.relays = [relay("gpu-a", 17), relay("gpu-b", 20, state="draining")]
        live.show(fleet_feed)
        text = text_of(acting.get(reverse("console:system")))
        assert "gpu-a:17:a1b2 Serving 12 8 31% 5" in text
        assert "gpu-b:20:a1b2 Draining" in text
        assert f"shard 1 llama-3.1-8b gpu-a:18 {NONE} Owned another 4 tcp://gpu-a:8201 Hand over… shard 1" in text
        assert (
            f"shard 2 none gpu-b:19 {NONE} Owned nobody 4 tcp://gpu-a:8201 shard 3 none gpu-b:19 {NONE} No owner nobody"
            in text
        )

    def test_a_shard_is_handed_over_and_says_so(self, acting, live, fleet_feed, owner_row):
        row = owner_row(name="gpu-a:18", wanted_at=timezone.now())
        live.show(fleet_feed)
        answer = acting.post(f"/operations/shards/{row.pk}/hand-over/", {"reason": "kernel update"}, follow=True)
        text = text_of(answer)
        assert "gpu-a:18 hands shard 1 over to a process that stands by." in text
        assert "Handed over" in text
        assert "Hand over…" not in text
        assert Event.objects.get(kind="shard.moved").reason == "kernel update"

    def test_a_model_is_dealt_with_what_belongs_to_it(self, acting, live, fleet_feed, language_model):
        other = Model.objects.create(
            name="other",
            title="Other",
            weights_bytes=1,
            kv_bytes_per_token=1,
            context_tokens=4096,
            fallback=language_model,
        )
        live.show(fleet_feed)
        page = text_of(acting.get(reverse("console:model", args=["llama-3.1-8b"])))
        assert "With it goes other: a model, its fallback" in page
        form = {"shard": "2", "reason": "load"}
        answer = acting.post(reverse("console:change-model", args=[language_model.pk, "shard"]), form, follow=True)
        assert "llama-3.1-8b and other: shard 2 from now on." in text_of(answer)
        other.refresh_from_db()
        assert other.shard == 2


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
        assert [each.instances for each in read_known(timezone.now()).minimums.values()] == [1]
        deployment.active = False
        deployment.save()
        assert read_known(timezone.now()).minimums == {}

    def test_plans_that_wait_for_an_operator(self, acting, live, fleet_feed, language_model):
        def plan(minutes, status=PlanStatus.ADVICE):
            until = timezone.now() + timedelta(minutes=minutes)
            ScalingPlan.objects.create(
                model=language_model, strategy="x", made_at=timezone.now(), valid_until=until, status=status
            )

        plan(5), plan(5), plan(-5), plan(5, PlanStatus.REJECTED)
        live.judge()
        html = html_of(acting, "overview")
        shown = html.partition('aria-label="Needs attention"')[2].partition("</ul>")[0]
        assert shown.count("waits for approval") == 1, "one alert a model"
        assert re.search(r'data-fragment="badge/scaling"><span class="count">1<span class="unseen"> to look at', html)
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
