"""The overview narrowed to one model, and instances out of sequences or KV cache."""

import re

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.selectors import open_of
from controlplane.console.pages.overview.charts import HEAT_ROWS, kv_heat_map
from controlplane.events.services import record
from controlplane.fleet.models import Deployment, GpuType, Instance
from controlplane.fleet.models import Model as LanguageModel
from controlplane.planning.outlook import see
from tests.console import planning_rows
from tests.console.conftest import rows_of
from tests.console.feed import Feed


def page(reader, name: str, *args, **query) -> str:
    answer = reader.get(reverse(f"console:{name}", args=args), query)
    assert answer.status_code == 200
    return answer.content.decode()


# The overview of one model


@pytest.fixture
def two_models(deployment, make_instance, gpu_type, region):
    """A failed instance of llama-3.1-8b, one of another model, and events about both and about the fleet."""
    other = Deployment.objects.create(
        model=LanguageModel.objects.create(
            name="mistral-7b", title="Mistral", weights_bytes=2**33, kv_bytes_per_token=2**17, context_tokens=8192
        ),
        region=region,
        gpu_type=gpu_type,
    )
    rows = [
        make_instance(state="failed", name="llama-one"),
        make_instance(state="failed", name="mistral-one", deployment=other),
    ]
    for row in rows:
        record("instance.moved", row, actor="gateway", before={"state": "ready"}, after={"state": "failed"})
    record("deployment.changed", other, actor="somebody", reason="more of mistral")
    record("supervisor.restarted", actor="supervisor", reason="redis ended")
    return rows


@pytest.mark.parametrize(("model", "others"), [("llama-3.1-8b", "mistral"), ("mistral-7b", "llama-one")])
def test_attention_is_of_the_model(reader, live, two_models, model, others):
    live.show(Feed(rows_of(two_models)))
    live.judge()
    html = page(reader, "overview", model=model)
    shown = "".join(re.findall(r'<ul class="event-list" aria-label="Needs attention".*?</ul>', html, re.DOTALL))
    assert f"{model.split('-')[0]}-one" in shown
    assert others not in shown
    assert "redis ended" in html  # decisions are of the whole fleet
    whole = page(reader, "overview")
    for name in ("llama-one", "mistral-one", "redis ended"):
        assert name in whole


def test_pushed_updates_can_be_filtered_too(live, two_models):
    """The live connection sends one list for all pages: each takes its model's part."""
    live.show(Feed(rows_of(two_models)))
    live.judge()
    alerts = live.feed.latest().alerts
    for model in ("llama-3.1-8b", "mistral-7b"):
        assert {each["model"] for each in open_of(alerts, model)} == {model}
        assert len(open_of(alerts, model)) < len(alerts)
    assert open_of(alerts, "without-trouble") == []
    assert open_of(alerts, "") == list(alerts)


# Saturation


def test_an_instance_with_all_its_sequences_is_saturated(reader, live, make_instance):
    full, free = (row | extra for row, extra in zip(
        rows_of([make_instance(), make_instance()]),
        ({"running": 12, "max_num_seqs": 12, "kv_ratio": 0.06}, {"running": 3, "max_num_seqs": 12, "kv_ratio": 0.31}),
        strict=True,
    ))  # fmt: skip
    Deployment.objects.update(max_num_seqs=12)
    live.show(Feed([full, free]))
    for name in ("overview", "fleet"):
        html = page(reader, name)
        cells = re.findall(r'data-fragment="instance/\d+/(running|use_ratio|kv_ratio):\w+">([^<]+)<', html)
        assert sorted(cells) == sorted(
            [("running", "12 / 12"), ("use_ratio", "100%"), ("kv_ratio", "6%"),
             ("running", "3 / 12"), ("use_ratio", "31%"), ("kv_ratio", "31%")]
        )  # fmt: skip
        assert html.count('data-status="saturated"') == 1
    html = page(reader, "instance", "instance-1")
    assert re.search(r'use_ratio:percent">100%</span></b>', html)
    assert re.findall(r'/instances/(instance-\d)/"', page(reader, "fleet", sort="-use_ratio"))[0] == "instance-1"


def test_decisions_not_the_steps_that_follow_from_them(reader, live, make_instance, operator):
    row = make_instance()
    record("scaling.added", row, actor="floor", reason="use is 92%")
    record("instance.start_requested", row, actor="floor", reason="a step of the floor")
    record(
        "instance.moved",
        row,
        actor="worker",
        before={"state": "loading"},
        after={"state": "ready"},
        reason="health check passed",
    )
    record(
        "instance.moved", row, actor=operator, before={"state": "ready"}, after={"state": "draining"}, reason="kernel"
    )
    live.show(Feed(rows_of([row])))
    html = page(reader, "overview")
    assert "use is 92%" in html
    assert "kernel" in html, "what a person did is a decision"
    assert "a step of the floor" not in html
    assert "health check passed" not in html


def test_demand_of_the_fleet_is_that_of_its_models(reader, live, two_models):
    """Past and capacity are sums over models, and so is the forecast, once each endpoint has one."""
    now = timezone.now()
    Instance.objects.update(state="ready")
    planning_rows.furnish(now, hours=2)
    assert "Demand, forecast and capacity" in page(reader, "overview")
    outlooks = [see(model, "", 1, now) for model in ("", "llama-3.1-8b", "mistral-7b")]
    for name in ("actual", "capacity"):
        whole, *parts = (getattr(outlook, name) for outlook in outlooks)
        assert any(whole)
        for value, *own in zip(whole, *parts, strict=False):
            assert (value or 0) == pytest.approx(sum(part or 0 for part in own))
    assert outlooks[0].planned == pytest.approx(sum(outlook.planned or 0 for outlook in outlooks[1:]))
    peaks = [next(filter(None, outlook.expected)).upper_95 for outlook in outlooks]
    assert peaks[0] == pytest.approx(peaks[1] + peaks[2])


def test_what_the_fleet_costs_an_hour(reader, live, make_instance):
    rows = [make_instance(), make_instance(state="stopped")]
    GpuType.objects.update(on_demand_usd_per_hour=2.5)
    Deployment.objects.update(tensor_parallel=2)
    live.show(Feed(rows_of(rows)))
    assert "$5.00 an hour" in page(reader, "overview")


def test_the_fullest_instances_are_drawn_and_the_table_has_all():
    names = [f"instance-{number}" for number in range(HEAT_ROWS + 3)]
    samples = [
        {"ts": 1_790_000_000 + at, "kv": {name: number / 20 for number, name in enumerate(names)}} for at in (0, 5)
    ]
    chart = kv_heat_map(samples, names)
    assert [row[0] for row in chart.rows] == names[::-1], "fullest first"
    (drawn,) = chart.series
    assert list(drawn.names) == names[3:], "the first row is at the bottom"
    assert f"The {HEAT_ROWS} fullest of {len(names)} instances" in chart.caption
