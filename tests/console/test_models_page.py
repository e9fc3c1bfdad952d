"""Models: the list, and the page of one with its policy, engine settings, lengths and shared names."""

import csv
import html
import io
import re
from datetime import timedelta

import orjson
import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.api.routers import system
from controlplane.console.pages.models import lengths
from controlplane.console.pages.models.selectors import TIMES, model_rows
from controlplane.events.models import Event
from controlplane.fleet.inventory.kinds import DEPLOYMENT, MODEL
from controlplane.fleet.inventory.services import change
from controlplane.fleet.models import Adapter, Deployment, Instance, Model, Region, Rollout, ScheduledMinimum
from controlplane.gateway.models import MinuteRow
from controlplane.lengths import training
from controlplane.lengths.models import LengthMinute
from controlplane.planning import outlook, services
from scheduling.bundles import BUNDLES
from tests.console import length_rows, planning_rows
from tests.console.conftest import rows_of
from tests.console.feed import Feed


@pytest.fixture
def two_regions(deployment, make_instance, gpu_type):
    """Two instances ready and one loading in US East, one ready of at least none in US West."""
    west = Region.objects.create(name="us-west", title="US West")
    other = Deployment.objects.create(
        model=deployment.model, region=west, gpu_type=gpu_type, tensor_parallel=2, min_instances=0, max_instances=5
    )
    rows = [make_instance(state=state) for state in ("ready", "ready", "loading")]
    rows += [make_instance(state=state, deployment=other) for state in ("ready", "stopped")]
    return rows


def page(reader, name="", **query) -> str:
    answer = reader.get(reverse("console:model", args=[name]) if name else reverse("console:models"), query)
    assert answer.status_code == 200
    return answer.content.decode()


def test_an_instance_that_does_not_answer_is_not_ready_on_any_surface(two_regions, live, reader, monkeypatch):
    silent, *others = rows_of(two_regions)
    summary = live.show(Feed([silent | {"reachable": False}, *others]))
    monkeypatch.setattr(system, "read_published", lambda key: orjson.dumps(summary))
    (row,) = model_rows(live.feed.latest(), timezone.now())
    total = reader.get("/api/endpoints").json()["total"]["instances_ready"]
    assert row.sums.ready == total == summary["fleet"]["instances_ready"] == 2


def test_a_row_has_its_endpoints_its_limit_and_its_cost(two_regions, live, reader):
    live.show(Feed(rows_of(two_regions)))
    (row,) = model_rows(live.feed.latest(), timezone.now())
    east, west = row.there
    assert (east.load.ready, *east.state) == (2, "loading", "1 starting")
    assert (west.load.ready, west.least, west.most, *west.state) == (1, 0, 5, "ready", "")
    assert (row.sums.ready, row.most) == (3, 8)
    assert row.sums.usd_per_hour == pytest.approx(4 * 2 * 1.35)  # what serves or starts, two GPUs each
    assert row.live["slo_met_ratio"] == live.feed.latest().tile("llama-3.1-8b")["slo_met_ratio"]
    html = page(reader)
    assert "1 starting" in html
    assert "$10.80" in html
    assert f"2 {TIMES} A100 80 GB" in html
    Model.objects.create(name="lonely", title="Lonely", weights_bytes=1, kv_bytes_per_token=1, context_tokens=1)
    assert page(reader).count('<span class="muted">not deployed</span>') == 1
    assert list(csv.reader(page_file(reader)))[1][0] == "llama-3.1-8b"


def page_file(reader) -> io.StringIO:
    answer = reader.get(reverse("console:models"), {"format": "csv"})
    return io.StringIO(b"".join(answer.streaming_content).decode())


def test_on_the_first_day_it_says_how_to_begin(reader):
    html = page(reader)
    assert "No models yet." in html
    assert "manage.py up" in html


@pytest.mark.parametrize(
    ("states", "least", "status", "said"),
    [
        (("failed",), 0, "failed", "1 failed"),
        ((), 1, "failed", "none ready"),
        ((), 0, "stopped", "none"),
        (("provisioning",), 1, "loading", "1 starting"),
    ],
)
def test_the_mark_of_an_endpoint_is_the_worst_that_can_be_said(
    deployment, make_instance, live, states, least, status, said
):
    Deployment.objects.update(min_instances=least)
    for state in states:
        make_instance(state=state)
    (endpoint,) = model_rows(live.feed.latest(), timezone.now())[0].there
    assert endpoint.state == (status, said)


def test_the_page_of_a_model_has_classes_parts_and_a_chart(two_regions, live, reader):
    now = timezone.now()
    planning_rows.furnish(now, hours=2)
    MinuteRow.objects.all().delete()
    MinuteRow.objects.create(
        minute=now - timedelta(minutes=5), model="llama-3.1-8b", region="us-east", slo_class="interactive",
        requests=10, slo_judged=8, slo_met=6, output_tokens=600,
    )  # fmt: skip
    html = page(reader, "llama-3.1-8b")
    assert "75.0%" in html
    assert 'title="6 of 8 judged"' in html
    assert f'<td class="num warn-text">5.0{TIMES}</td>' in html  # misses: a quarter where a twentieth is allowed
    for words in ("Router", "Join shortest queue", "The instance with the fewest tokens left to do."):
        assert words in html
    assert 'data-chart="demand"' in html
    assert "scaled by LT-UA, ask" in html
    assert "Switch the policy" not in html  # a viewer reads
    assert reader.get(reverse("console:model", args=["no-such-model"])).status_code == 404


def test_as_many_queries_for_any_number_of_instances(
    two_regions, make_instance, reader, django_assert_max_num_queries, live
):
    page(reader)
    for _ in range(20):
        make_instance()
    with django_assert_max_num_queries(50):
        page(reader)


def test_parts_are_given_with_a_reason_and_one_event(two_regions, acting):
    model = Model.objects.get()
    values = {"routing_policy": "round_robin", "ordering_policy": "priority", "FORECASTER": "arima"}
    answer = acting.post(
        reverse("console:change-model", args=[model.pk, "parts"]), values | {"reason": "to compare"}, follow=True
    )
    assert re.search("The policy of llama-3.1-8b: Custom; the next decisions", answer.content.decode())
    event = Event.objects.get(kind="model.parts_switched")
    assert event.before == {"routing_policy": "join_shortest_queue", "FORECASTER": ""}
    assert event.after == {"routing_policy": "round_robin", "FORECASTER": "arima"}
    assert set(Deployment.objects.values_list("routing_policy", flat=True)) == {"round_robin"}
    acting.post(
        reverse("console:change-model", args=[model.pk, "parts"]), {"routing_policy": "best", "reason": "a typo"}
    )
    assert Event.objects.filter(kind="model.parts_switched").count() == 1


def test_bounds_are_changed_together_or_not_at_all(two_regions, client, fleet_admin, operator):
    model = Model.objects.get()
    east, west = Deployment.objects.order_by("pk")
    url, reason = reverse("console:change-model", args=[model.pk, "bounds"]), {"reason": "the evening"}
    values = {f"min_instances-{east.pk}": "2", f"max_instances-{east.pk}": "3", f"max_instances-{west.pk}": "5"}
    client.force_login(operator)
    assert client.post(url, values | reason).status_code == 403  # as over REST
    client.force_login(fleet_admin)
    assert f'name="max_instances-{west.pk}" value="5"' in page(client, model.name)
    assert "Bounds of llama-3.1-8b: 1 changed." in client.post(url, values | reason, follow=True).content.decode()
    assert list(Deployment.objects.order_by("pk").values_list("min_instances", "max_instances")) == [(2, 3), (0, 5)]
    event = Event.objects.get(kind="deployment.changed")
    assert (event.before, event.reason) == ({"min_instances": 1}, "the evening")
    wrong = {f"max_instances-{east.pk}": "2", f"min_instances-{west.pk}": "9"}
    refused = client.post(url, wrong | reason, follow=True).content.decode()
    assert "Not below the minimum of 9 instances." in refused
    assert Event.objects.filter(kind="deployment.changed").count() == 1
    assert Deployment.objects.get(pk=east.pk).max_instances == 3


def test_a_scheduled_minimum_is_shown_and_drawn(two_regions, client, fleet_admin):
    model = Model.objects.get()
    client.force_login(fleet_admin)
    ScheduledMinimum.objects.create(
        name="office", model=model, instances=3, weekdays="mon fri", begins="08:00", ends="18:00",
        time_zone="Europe/Berlin", except_on="2026-12-25",
    )  # fmt: skip
    row, shown = ScheduledMinimum.objects.get(), page(client, model.name)
    for words in ("3 in each region, mon fri 08:00 to 18:00 Europe/Berlin, not on 2026-12-25", "#schedule"):
        assert words in shown
    row.weekdays, row.except_on, row.begins, row.ends = "", "", "00:00", "00:00"
    row.save()
    steps = outlook._scheduled(model.name, "", timezone.now(), timezone.now() + timedelta(hours=1))
    assert [value for _, value in steps] == [0.0, 0.0]  # no plan has valued an instance


def drawn_before(page, address):
    return re.search(rf'action="{address}"[^>]*>.*?name="drawn_after" value="(\d+)"', page, re.S)[1]


@pytest.mark.parametrize(
    ("form", "values", "others", "said"),
    [
        ("bounds", {"max_instances-{east}": "3"}, {"max_instances": 6}, "max_instances from 3 to 6"),
        ("engine", {"deployment": "{east}", "max_num_seqs": "9"}, {"max_num_seqs": 8}, "max_num_seqs from 256 to 8"),
        ("fallback", {"fallback": "", "fallback_wait_s": ""}, {"fallback": "small"}, "fallback from nothing to small"),
        ("parts", {"routing_policy": "preserve"}, "qlm", "ordering_policy of llama-3.1-8b from priority to qlm"),
        ("bundle", {"bundle": "ssjf"}, {"routing_policy": "round_robin"}, "to round_robin at"),
        (
            "policy",
            {"strategy": "reactive", "mode": "off"},
            "pilothouse",
            "strategy of llama-3.1-8b from none to pilothouse",
        ),
    ],
)
def test_no_dialog_overwrites_unseen(two_regions, client, fleet_admin, form, values, others, said):
    model, east = Model.objects.get(), Deployment.objects.order_by("pk").first()
    Model.objects.create(name="small", title="Small", weights_bytes=1, kv_bytes_per_token=1, context_tokens=9)
    values = {name.format(east=east.pk): value.format(east=east.pk) for name, value in values.items()} | {
        "reason": "mine"
    }
    if form == "parts":
        values["ordering_policy"] = "priority"
    client.force_login(fleet_admin)
    address = reverse("console:change-model", args=[model.pk, form])
    shown = reverse("console:model", args=[model.name])
    if form == "policy":
        shown = f"{reverse('console:scaling')}?open={model.name}"

    def save(page):
        answer = client.post(address, values | {"drawn_after": drawn_before(page, address)}, follow=True)
        return answer.content.decode()

    drawn = client.get(shown).content.decode()
    if isinstance(others, str):
        services.switch_bundle(model, others, "bob")
    else:
        kind, row = (MODEL, model) if "fallback" in others else (DEPLOYMENT, east)
        change(kind, row, others, "bob")
    before = Event.objects.count()
    refused = html.unescape(save(drawn))
    assert "Nothing was saved: since this was read, bob changed " in refused
    assert said in refused
    assert Event.objects.count() == before
    again = client.get(shown).content.decode()
    assert "Nothing was saved" not in save(again)
    assert Event.objects.count() > before


def test_a_fallback_is_given_and_taken_away(two_regions, client, fleet_admin, operator):
    model = Model.objects.get()
    Model.objects.create(name="small", title="Small", weights_bytes=1, kv_bytes_per_token=1, context_tokens=9)
    url, values = (
        reverse("console:change-model", args=[model.pk, "fallback"]),
        {"fallback": "small", "fallback_wait_s": "2.5"},
    )
    client.force_login(operator)
    assert client.post(url, values | {"reason": "an outage"}).status_code == 403
    client.force_login(fleet_admin)
    for given, shown in (("2.5", "that would wait above"), ("", "before its first token. <a")):
        said = client.post(
            url, values | {"fallback_wait_s": given, "reason": "an outage"}, follow=True
        ).content.decode()
        assert f"small is the fallback of {model}." in said
        assert shown in page(client, model.name)
    refused = client.post(
        url, values | {"fallback_wait_s": "soon", "reason": "an outage"}, follow=True
    ).content.decode()
    assert "is no number of seconds." in refused
    client.post(url, {"fallback": "", "reason": "it is over"})
    model.refresh_from_db()
    assert (model.fallback, model.fallback_wait_s) == (None, None)


def test_names_are_shared_and_compared(two_regions, client, fleet_admin, operator):
    model = Model.objects.get()
    url = reverse("console:change-model", args=[model.pk, "share"])
    client.force_login(operator)
    assert client.post(url, {"name": "chat", "targets": f"{model} 5", "reason": "x"}).status_code == 403
    client.force_login(fleet_admin)
    assert "a canary of a new version" in page(client, model.name)
    for targets, said in (
        (f"{model}", "is no target with a weight"),
        ("nothing 5", "There is no model or adapter"),
        (f"{model} 5", f"chat is shared among {model}"),
    ):
        answer = client.post(url, {"name": "chat", "targets": targets, "reason": "canary"}, follow=True)
        assert said in answer.content.decode()
    assert f'value="{model} 5"' in answer.content.decode()
    client.post(url, {"name": "chat", "targets": "", "reason": "it is over"})
    assert "a canary of a new version" in page(client, model.name)


@pytest.mark.parametrize(
    ("given", "said", "rollouts"),
    [
        ({"max_num_seqs": "32", "roll_out": "on", "bake_s": "5", "auto_back": "on"}, "the rollout begins", 1),
        ({"max_num_seqs": "32"}, "instances take them when they start", 0),
        ({"max_num_seqs": "256", "roll_out": "on"}, "are as they were", 0),
        ({"max_num_seqs": "many"}, "Sequences at once: “many” value must be an integer.", 0),
        ({"max_loras": "4", "max_cpu_loras": "2"}, "Not below the 4 adapters on the GPU", 0),
        ({"max_num_seqs": "32", "roll_out": "on", "bake_s": "-1"}, "greater than or equal to 0", 0),
        ({"deployment": "0", "max_num_seqs": "32"}, "That deployment of llama-3.1-8b is gone.", 0),
    ],
)
def test_engine_settings_are_changed_and_rolled_out(two_regions, client, fleet_admin, operator, given, said, rollouts):
    model, east = Model.objects.get(), Deployment.objects.order_by("pk").first()
    Instance.objects.update(launched_with={"max_num_seqs": 256})
    url = reverse("console:change-model", args=[model.pk, "engine"])
    values = {"deployment": str(east.pk), "reason": "longer batches"} | given
    client.force_login(operator)
    assert client.post(url, values).status_code == 403  # as over REST
    client.force_login(fleet_admin)
    shown = page(client, model.name)
    assert 'name="max_num_seqs" value="256"' in shown
    assert "1 of 2" not in shown
    answer = html.unescape(client.post(url, values, follow=True).content.decode())
    assert said in answer
    assert Rollout.objects.count() == rollouts
    changed = ("is no value" not in said and rollouts) or "when they start" in said
    east.refresh_from_db()
    assert east.max_num_seqs == (32 if changed else 256)
    if rollouts:
        assert (Rollout.objects.get().bake_s, Rollout.objects.get().auto_back) == (5, True)
        assert "Begins within seconds." in answer


def test_a_bundle_is_named_with_what_differs(two_regions, live, operator):
    model = Model.objects.get()
    services.switch_bundle(model, "pilothouse", operator)
    (row,) = model_rows(live.feed.latest(), timezone.now())
    assert (row.present.title, row.about) == ("Pilothouse", BUNDLES["pilothouse"].about)
    Deployment.objects.update(routing_policy="round_robin")
    (row,) = model_rows(live.feed.latest(), timezone.now())
    assert (row.present.title, row.about) == ("Custom", "Based on Pilothouse, with its own router.")


def test_the_page_lists_the_adapters_of_its_model(two_regions, reader, deployment):
    assert "<dt>LoRA adapters" not in page(reader, deployment.model.name)
    Adapter.objects.create(name="llama-sql", base=deployment.model, source="acme/llama-sql", rank=16)
    Adapter.objects.create(name="llama-old", base=deployment.model, source="acme/llama-old", active=False)
    section = page(reader, deployment.model.name).partition("<dt>LoRA adapters")[2]
    assert re.search(r"llama-sql</strong> <span[^>]*>acme/llama-sql, rank 16</span>", section)
    assert re.search(r"llama-old</strong> <span[^>]*>acme/llama-old, rank 8, not offered</span>", section)


# Lengths


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "Good enough: <strong"),
        ({"below_upper": 70}, "70% of answers are within the 0.9 quantile, and 90% should be"),
        ({"predictor": "prior"}, "for 100% the length model was late or failed"),
    ],
)
def test_one_line_says_how_well_lengths_are_predicted(two_regions, reader, changes, said):
    name = Model.objects.get().name
    assert "No request of the last day ended by itself." in page(reader, name)
    values = {"requests": 100, "absolute_error_tokens": 4_000, "output_tokens": 30_000, "below_upper": 90}
    LengthMinute.objects.create(
        minute=timezone.now() - timedelta(hours=2),
        model=name,
        tenant="acme",
        **{"predictor": "trees 2"} | values | changes,
    )
    line = page(reader, name).partition('id="lengths"')[2].partition("</div>")[0]
    assert "Off by 40.0 tokens on average, where an answer has 300; 100 requests" in line
    assert said in line
    assert ("ok-text" in line) == (not changes)


def test_versions_show_how_they_fare_and_the_shadow_against_the_active_one(reader, acme):
    now = timezone.now()
    assert "No version has been trained yet" in page(reader)
    length_rows.furnish(now)
    rows = lengths.version_rows(now)
    requests = {row.number: row.measured["requests"] for row in rows}
    assert requests[3] > requests[2] > 0  # it also predicts what caches answer
    assert requests[1] is requests[4] is None
    assert [row.number for row in rows if row.gain is not None] == [3]
    shown = page(reader).partition('id="versions"')[2]
    assert "better</span>" in shown
    assert "Promote…" not in shown


def test_training_is_asked_for(acting, acme, monkeypatch, settings):
    length_rows.samples(timezone.now(), 100, acme)
    train, asked = reverse("console:train-lengths"), []

    def said() -> str:
        return acting.post(train, {"reason": "new prompts"}, follow=True).content.decode()

    settings.LENGTH_TRAIN_SAMPLES = 1_000
    assert "There are 100 samples to learn from" in said()
    settings.LENGTH_TRAIN_SAMPLES = 50
    monkeypatch.setattr(training, "send_task", lambda task, *args, **kwargs: asked.append((task, *args)) or True)
    assert "A worker trains a new version" in said()
    assert asked == [(training.TASK, "trees", "operator", "new prompts")]
    assert "50 more samples with text wanted" in page(acting), "nobody keeps prompts"
    monkeypatch.setattr(training, "send_task", lambda *args, **kwargs: False)
    assert "broker does not answer" in said()
