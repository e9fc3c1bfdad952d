"""Rules open and resolve alerts; people acknowledge and silence them; only a webhook's host is shown."""

import html
import re
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from django.apps import apps
from django.core.exceptions import ValidationError
from django.urls import resolve
from django.utils import timezone
from msgspec.structs import replace

from controlplane.accounts.models import Budget
from controlplane.alerts import services
from controlplane.alerts.conditions import burns, problems_of
from controlplane.alerts.models import Alert, AlertRule, Condition
from controlplane.alerts.problems import Known, Problem, find, read_known
from controlplane.alerts.selectors import open_of, unresolved
from controlplane.alerts.watch import AlertWatch
from controlplane.events.models import Event
from controlplane.fleet.attainment import Attainment
from controlplane.fleet.inventory.services import change, create
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.models import MinuteRow
from controlplane.planning.models import ScalingMove, ScalingPlan
from controlplane.resources.alerts import by_state
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db
NOTHING: tuple[Problem, ...] = ()
SECRET = "https://hooks.example.com/services/T0/secret"


def rule_of(condition: str, **values) -> AlertRule:
    return create(services.ALERT_RULE, {"name": f"rule of {condition}", "condition": condition, **values}, "test")


NUMBERS = dict.fromkeys(("use_ratio", "running", "max_num_seqs", "kv_ratio", "waiting"), 0)


def found(**tables) -> tuple[Problem, ...]:
    """What rows and *tables* say is wrong."""
    return find(tables, read_known(timezone.now()))


def instance(name: str, status: str, model: str = "m") -> dict[str, object]:
    return {"name": name, "status": status, "model": model, "region": "r", "trouble": "5 s"} | NUMBERS


def subjects(rule: AlertRule, problems: tuple[Problem, ...] = NOTHING) -> list[tuple[str, float | None]]:
    problems = problems_of(rule, timezone.now(), problems)
    for each in problems:
        assert resolve(urlsplit(each.href).path).namespace == "console"
    return [(each.subject, each.value) for each in problems]


def minute(model: str, ago: timedelta, judged: int, missed: int, **values) -> None:
    at = (timezone.now() - ago).replace(second=0, microsecond=0)
    MinuteRow.objects.create(
        minute=at, model=model, slo_class="interactive", slo_judged=judged, slo_met=judged - missed, **values
    )


def test_an_slo_counts_over_both_windows_by_model_and_class(slo_class):
    """The class promises 95%: 14.4 times 5% is 72% of misses."""
    for ago in (2, 30):
        minute("bad", timedelta(minutes=ago), 100, 80)
    minute("was-bad", timedelta(minutes=30), 1000, 1000)  # and is no longer
    minute("was-bad", timedelta(minutes=2), 100, 0)
    minute("just-began", timedelta(minutes=2), 100, 80)
    minute("just-began", timedelta(minutes=30), 1000, 0)
    minute("few", timedelta(minutes=2), 9, 9)
    assert subjects(rule_of("slo_burn", threshold=14.4)) == [("bad, interactive", 16.0)]
    rule = AlertRule(condition="slo_burn", threshold=1.0, slo_class="opportunistic")
    assert subjects(rule) == []
    assert [subject for subject, _ in subjects(AlertRule(condition="slo_burn", threshold=1.0, model="just-began"))] == [
        "just-began, interactive"
    ]


@pytest.mark.parametrize(
    ("long", "short", "expected"),
    [
        ((900, 1000), (9, 10), True),
        ((900, 1000), (95, 100), False),
        ((950, 1000), (9, 10), False),
        ((9, 10), (0, 9), False),
    ],
)
def test_a_burn_needs_both_windows_and_some_requests(long, short, expected):
    made = [Attainment("c", met, judged, 0.99) for met, judged in (long, short)]
    assert burns(*made, threshold=10.0 - 1e-9) is expected


def test_each_other_condition_finds_its_subjects(acme, language_model):
    now = timezone.now()
    Budget.objects.create(tenant=acme, kind="usd_per_month", hard=100, spent_usd=95.0, spent_until=now)
    Budget.objects.create(tenant=acme, model="m", kind="usd_per_month", hard=100, spent_usd=20.0, spent_until=now)
    Budget.objects.create(tenant=acme, kind="tokens_per_minute", hard=5, stopped_at=now - timedelta(minutes=5))
    Budget.objects.create(tenant=acme, kind="requests_per_minute", hard=5, stopped_at=now - timedelta(hours=2))
    assert subjects(rule_of("budget")) == [("Acme", 1.0), ("Acme", 0.95)]

    statuses = ("failed", "resting", "unreachable", "saturated", "ready", "draining", "stopped")
    wrong = found(instances=[instance(status, status) for status in statuses])
    assert [name for name, _ in subjects(rule_of("instance"), wrong)] == ["failed", "unreachable", "resting"]
    assert subjects(AlertRule(condition="instance", model="another"), wrong) == []

    ScalingPlan.objects.create(model=language_model, strategy="lt_ua", valid_until=now + timedelta(hours=1))
    ScalingPlan.objects.create(model=language_model, strategy="lt_ua", valid_until=now - timedelta(hours=1))
    assert subjects(rule_of("plan"), found()) == [(language_model.name, None)]

    job = {
        "name": "plans",
        "state": "late",
        "quiet": False,
        "failures_in_a_row": 0,
        "last_success_at": None,
        "kind": "celery",
    }
    report = {
        "jobs": [job, job | {"name": "hidden", "quiet": True}, job | {"name": "fine", "state": "ok"}],
        "parts": [
            {"name": "redis", "state": "down", "detail": "refused"},
            {"name": "web", "state": "ok", "detail": ""},
        ],
    }
    assert [name for name, _ in subjects(rule_of("job"), found(**report))] == ["part redis", "job plans"]

    shares = {"": 0.5, "bad": 0.02, "so-so": 0.002, "fine": 0.001, "idle": None}
    wrong = found(tiles=[{"scope": name, "failed_ratio": share} for name, share in shares.items()])
    errors = [(each.subject, each.severity) for each in wrong if each.kind == "errors"]
    assert errors == [("bad", "critical"), ("so-so", "warning")]

    for delta in (1, -1, 1, -1, 1):
        ScalingMove.objects.create(
            model="m", region="r", delta=delta, source="floor", strategy="reactive", gpu_type="g", reason="test"
        )
    assert subjects(rule_of("flapping"), found()) == [("m in r", 4.0)]


FAILED = find({"instances": [instance("one", "failed")]}, Known())


@pytest.mark.parametrize("own_time", [True, False])
def test_an_alert_opens_once_stays_and_resolves(own_time):
    """After the time of the rule, with one event for its beginning and one for its end."""
    rule, begin = rule_of("instance", for_s=30), timezone.now()
    failed = tuple(replace(each, since=begin if own_time else None) for each in FAILED)
    watch = AlertWatch(SimpleNamespace(), lambda: NOTHING)
    watch.judge(begin, failed)
    watch.judge(begin + timedelta(seconds=10), failed)
    assert not Alert.objects.exists()
    for after_s in (31, 41, 51):
        watch.judge(begin + timedelta(seconds=after_s), failed)
    alert = Alert.objects.get()
    assert (alert.rule, alert.subject, alert.since, alert.state) == (rule, "one", begin, "open")
    for after_s, problems, state, told in (
        (56, NOTHING, "resolved", 1),  # at once, and for a moment
        (61, failed, "open", 1),
        (66, NOTHING, "resolved", 1),
        (122, NOTHING, "resolved", 2),
    ):
        watch.judge(begin + timedelta(seconds=after_s), problems)
        assert Alert.objects.get().state == state
        assert Event.objects.filter(kind__startswith="alert.").count() == told
    assert Alert.objects.get().resolved_at == begin + timedelta(seconds=66)
    kinds = Event.objects.filter(kind__startswith="alert.").order_by("pk").values_list("kind", flat=True)
    assert list(kinds) == ["alert.opened", "alert.resolved"]
    services.prune(begin + timedelta(days=31))
    assert not Alert.objects.exists()


def test_a_process_that_just_began_resolves_nothing_yet():
    """It may not have noticed what still holds."""
    rule_of("job")
    now, nothing = timezone.now(), lambda: NOTHING
    AlertWatch(SimpleNamespace(), nothing).judge(now, found(parts=[{"name": "redis", "state": "down", "detail": ""}]))
    later, restarted = now + timedelta(minutes=10), AlertWatch(SimpleNamespace(), nothing)
    for after_s, count in ((0, 1), (30, 1), (61, 0)):
        restarted.judge(later + timedelta(seconds=after_s), NOTHING)
        assert Alert.objects.open().count() == count


def test_what_has_no_time_of_its_own_waits_from_when_it_was_first_seen():
    rule_of("instance", for_s=30)
    watch, now = AlertWatch(SimpleNamespace(), lambda: NOTHING), timezone.now()
    for after_s, problems, count in ((0, FAILED, 0), (20, NOTHING, 0), (40, FAILED, 0), (70, FAILED, 1)):
        watch.judge(now + timedelta(seconds=after_s), problems)
        assert Alert.objects.count() == count


def test_a_rule_opens_a_bounded_number_and_one_that_is_switched_off_resolves_its_own(monkeypatch):
    monkeypatch.setattr(services, "MAX_OPEN", 2)
    rule = rule_of("instance")
    failed = found(instances=[instance(name, "failed") for name in "abc"])
    now = timezone.now()
    watch = AlertWatch(SimpleNamespace(), lambda: NOTHING)
    watch.judge(now, failed)
    assert Alert.objects.open().count() == 2
    change(services.ALERT_RULE, rule, {"active": False}, "test")
    watch.judge(now, failed)
    assert not Alert.objects.open().exists()


def test_an_alert_is_acknowledged_and_silenced_with_events(alert, operator):
    now = timezone.now()
    assert [each["subject"] for each in open_of(unresolved())] == ["job plans"]
    assert services.acknowledge(alert, operator, "seen").acknowledged_by == operator.username
    assert open_of(unresolved()) == []
    with pytest.raises(ActionError, match="was acknowledged by"):
        services.acknowledge(alert, operator)
    for until in (now - timedelta(minutes=1), now + timedelta(days=91)):
        with pytest.raises(ValidationError, match="within 90 days"):
            services.silence(alert, until, operator)
    assert services.silence(alert, now + timedelta(hours=1), operator, "maintenance").state == "silenced"
    for state, count in (
        ("silenced", 1),
        ("acknowledged", 0),
        ("open", 0),
        ("unresolved", 1),
        ("resolved", 0),
        ("", 1),
    ):
        assert by_state(Alert.objects.all(), state).count() == count, state
    assert services.silence(alert, None, operator).state == "acknowledged"
    kinds = Event.objects.filter(kind__startswith="alert.").order_by("pk").values_list("kind", flat=True)
    assert list(kinds) == ["alert.acknowledged", "alert.silenced", "alert.unsilenced"]
    Alert.objects.update(resolved_at=now)
    for act in (lambda: services.acknowledge(alert, operator), lambda: services.silence(alert, None, operator)):
        with pytest.raises(ActionError, match="is resolved already"):
            act()


def test_a_silence_holds_when_the_alert_opens_again(operator):
    now = timezone.now()
    rule_of("instance", receivers=SECRET)
    watch = AlertWatch(SimpleNamespace(), lambda: NOTHING)
    assert len(watch.judge(now, FAILED)) == 1
    services.silence(Alert.objects.get(), now + timedelta(hours=2), operator, "known")
    Alert.objects.update(resolved_at=now)
    assert watch.judge(now + timedelta(minutes=5), FAILED) == []
    assert Alert.objects.unresolved().get(subject="one").state == "silenced"


@pytest.fixture
def alert():
    now = timezone.now()
    return Alert.objects.create(rule=rule_of("job"), subject="job plans", since=now, opened_at=now, seen_at=now)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"condition": "job", "threshold": 2.0}, "threshold"),
        ({"condition": "job", "model": "m"}, "model"),
        ({"condition": "instance", "slo_class": "interactive"}, "slo_class"),
        ({"condition": "slo_burn", "window_s": 60}, "window_s"),
        ({"condition": "job", "receivers": "file:///etc/passwd"}, "receivers"),
        ({"condition": "job", "receivers": "ops@example.com gopher://x/"}, "receivers"),
        ({"condition": "job", "receivers": "nobody"}, "receivers"),
        ({"condition": "weather"}, "condition"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(values, field):
    with pytest.raises(ValidationError) as refused:
        create(services.ALERT_RULE, {"name": "wrong", **values}, "test")
    assert field in refused.value.message_dict


def test_a_webhook_is_shown_by_its_host_alone(client, fleet_admin, viewer):
    client.force_login(fleet_admin)
    body = {"name": "r", "condition": "job", "receivers": SECRET}
    made = client.post("/api/alert-rules", body, content_type="application/json")
    assert made.status_code == 201, made.content
    assert made.json()["receivers"] == "https://hooks.example.com/…"
    rule = AlertRule.objects.get(name="r")
    changed = client.patch(f"/api/alert-rules/{rule.pk}", {"for_s": 60}, content_type="application/json")
    assert changed.json()["for_s"] == 60
    assert AlertRule.objects.get(name="r").receivers == SECRET
    dialog = f"/alerts/?edit={rule.pk}"
    pages = [client.get(address) for address in ("/alerts/", "/api/alert-rules", dialog, "/events/", "/api/events")]
    form = {"name": "r", "condition": "job", "severity": "info", "window_s": 3600, "for_s": 0, "repeat_hours": 4,
            "reason": "x"}  # fmt: skip
    saved = client.post(dialog, form | {"receivers": "", "webhook_format": "slack", "active": "on"})
    assert saved.status_code == 302, saved.content.decode()[:2000]
    assert AlertRule.objects.get(name="r").receivers == SECRET
    client.post(dialog, form | {"receivers": "-", "webhook_format": "slack"})
    assert AlertRule.objects.get(name="r").receivers == ""
    client.force_login(viewer)
    pages += [client.get(address) for address in ("/alerts/", "/api/alert-rules", "/alerts/?format=csv")]
    for page in pages:
        assert page.status_code == 200
        assert b"T0/secret" not in (b"".join(page.streaming_content) if page.streaming else page.content)
    assert "secret" not in str(list(Event.objects.values_list("before", "after")))
    assert Event.objects.filter(kind="alert_rule.changed").exists()


def test_the_page_names_what_is_open_and_acts(client, operator, alert):
    client.force_login(operator)
    page = client.get("/alerts/").content.decode()
    assert "job plans" in page
    assert "Acknowledge…" in page
    address = f"/alerts/{alert.pk}/"
    client.post(f"{address}silence/", {"reason": "known", "hours": "4"})
    assert Alert.objects.get().state == "silenced"
    client.post(f"{address}silence/", {"reason": "over"})
    assert Alert.objects.get().state == "open"
    wrong = client.post(f"{address}silence/", {"reason": "known", "hours": "1e9"}, follow=True)
    assert "hours is one of 1, 4, 24, 168" in wrong.content.decode()
    client.post(f"/operations/alerts/{alert.pk}/acknowledge/", {"reason": "seen"})
    assert Alert.objects.get().state == "acknowledged"
    assert "No alert is open." not in client.get("/alerts/?state=unresolved").content.decode()
    Alert.objects.all().delete()
    assert "No alert is open." in client.get("/alerts/").content.decode()


def test_every_condition_is_watched_from_the_start_and_once():
    built_in = import_module("controlplane.alerts.migrations.0003_one_notion_of_alarm")
    AlertRule.objects.create(name="own", condition="job")
    for _ in range(2):
        built_in.add_rules(apps, None)
        assert sorted(AlertRule.objects.values_list("condition", flat=True)) == sorted(Condition.values)
    assert not AlertRule.objects.exclude(receivers="").exists()


def test_a_missed_slo_names_its_causes_and_leads_to_their_requests(reader, slo_class, acme):
    """Class, cause and request are one click apart."""
    minute("bad", timedelta(minutes=1), 20, 20)
    now = timezone.now()
    given = {"model": "bad", "arrived_at": now, "slo_met": False}
    ways = (
        {"queue_ms": 9000, "ttft_ms": 9500, "e2e_ms": 12_000},
        {"queue_ms": 9000, "ttft_ms": 9500, "e2e_ms": 12_000},
        {"queue_ms": 10, "ttft_ms": 9500, "e2e_ms": 12_000},
        {"queue_ms": 10, "ttft_ms": 20, "e2e_ms": 12_000},
        {"queue_ms": 9000, "ttft_ms": 9500, "e2e_ms": 12_000, "attempts": 2},
    )
    for number, way in enumerate(ways):
        ledger_row(acme, request_id=f"r{number}", **given | way)
    ledger_row(acme, request_id="fine", **given | {"slo_met": True})
    rule_of("slo_burn")
    AlertWatch(SimpleNamespace(), lambda: NOTHING).judge(now, NOTHING)
    alert = Alert.objects.get()
    assert (alert.title, alert.severity) == ("bad misses its SLO for interactive", "critical")
    shares = {words: share for words, share, _ in alert.causes}
    assert shares == {
        "waited in the queue": 0.4, "slow prefill": 0.2, "slow decode": 0.2, "placed again after a loss": 0.2,
    }  # fmt: skip
    assert all(html.escape(to) in reader.get("/alerts/").content.decode() for _, _, to in alert.causes)
    shown = reader.get(alert.causes[0][2]).content.decode()
    assert re.findall(r"\br\d\b", re.sub(r"<[^>]*>", " ", shown)) == ["r1", "r0"]


def test_an_admin_makes_changes_and_deletes_a_rule_in_the_console(client, fleet_admin, operator):
    client.force_login(operator)
    assert client.get("/alerts/?edit=new").status_code == 403
    client.force_login(fleet_admin)
    assert 'id="edit"' in client.get("/alerts/?edit=new").content.decode()
    form = {
        "name": "mine", "condition": "job", "window_s": 3600, "for_s": 0, "repeat_hours": 4, "active": "on",
        "webhook_format": "slack", "receivers": "ops@example.com", "reason": "a test", "severity": "",
    }  # fmt: skip
    wrong = client.post("/alerts/?edit=new", form | {"receivers": "nobody"})
    assert wrong.status_code == 200
    assert "no mail address" in wrong.content.decode()
    assert not AlertRule.objects.exists()
    assert client.post("/alerts/?edit=new", form).status_code == 302
    rule = AlertRule.objects.get()
    assert "ops@example.com" in client.get("/alerts/").content.decode()
    client.post(f"/alerts/?edit={rule.pk}", form | {"for_s": 60, "receivers": ""})
    rule.refresh_from_db()
    assert (rule.for_s, rule.receivers) == (60, "ops@example.com")
    assert Event.objects.get(kind="alert_rule.changed").reason == "a test"
    client.post(f"/alerts/?edit={rule.pk}", {"delete": "1", "reason": "enough"})
    assert not AlertRule.objects.exists()
