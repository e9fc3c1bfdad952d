"""Demand, output, load, SLO by class, GPUs and cost agree on the page, over REST, in the ledger, in the gateway's
metrics, and in the emulated servers' counters.
"""

import asyncio
import re
from datetime import timedelta
from types import SimpleNamespace

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.db.models import F, Sum
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.console.live.state import state_of
from controlplane.console.pages.models.selectors import classes_of, model_rows
from controlplane.fleet.models import Deployment, Model, SloClass
from controlplane.fleet.selectors import usd_per_hour
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.planning.models import ScalingPlan
from tests.gateway.conftest import do_once, emulate_two, gateway_before, until
from tests.workers.conftest import emulator  # noqa: F401 (fixture)

ABLE = 400.0  # tokens a second of an instance, as the plan counts


@pytest.fixture
async def served(transactional_db, emulator, monkeypatch):  # noqa: F811
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    do_once(monkeypatch)
    _, backends = await emulate_two(emulator, ["east", "west"], 8)
    await database_sync_to_async(Deployment.objects.update)(tensor_parallel=2)
    async with gateway_before(backends, emulator=emulator) as served:
        yield served


def planned_and_aged() -> None:
    """A plan that values an instance, and traffic old enough to count as demand."""
    ScalingPlan.objects.create(
        model=Model.objects.get(),
        strategy="lt_ua",
        status="shadow",
        valid_until=timezone.now() + timedelta(hours=1),
        inputs={"capability_tokens_per_s": {"h100": {"used": ABLE}}},
    )
    MinuteRow.objects.update(minute=F("minute") - timedelta(minutes=3))


def seen(summary: dict) -> SimpleNamespace:
    """Figures of every surface, read at once."""
    now = timezone.now()
    (row,) = model_rows(state_of(summary, ()), now)
    operations = Tenant.objects.create(
        name="operations", title="Operations", operates_fleet=True, default_slo_class=SloClass.objects.first()
    )
    user = User.objects.create(username="reader")
    Membership.objects.create(user=user, tenant=operations, role=Role.VIEWER)
    client = Client()
    client.force_login(user)
    html = client.get(reverse("console:model", args=["m"])).content.decode()
    return SimpleNamespace(
        row=row,
        rest={each["region"]: each for each in client.get("/api/endpoints").json()["items"]},
        classes={each.hour.slo_class: each.hour for each in classes_of("m", now)},
        html=html,
        usd=usd_per_hour("m"),
        ledger=LedgerRow.objects.aggregate(prompt=Sum("prompt_tokens"), output=Sum("output_tokens")),
        ledger_slo={
            name: (
                LedgerRow.objects.filter(slo_class=name, slo_met=True).count(),
                LedgerRow.objects.filter(slo_class=name, slo_met__isnull=False).count(),
            )
            for name in ("interactive", "flexible")
        },
        minutes=MinuteRow.objects.values("minute").distinct().count(),
    )


async def test_every_surface_says_the_same(served):
    exact = {"stream": True, "ignore_eos": True, "max_tokens": 12}
    for headers in ({}, {"X-SLO-Class": "flexible"}):
        answers = await asyncio.gather(
            *(served.chat(headers | {"X-Region": region}, **exact) for region in ("east", "west", "east") * 4)
        )
        for answer in answers:
            assert answer.status == 200
            await answer.read()
    assert len(await served.rows()) == 24
    await database_sync_to_async(planned_and_aged)()
    snapshot = served.gateway.publisher.summary.snapshot
    await until(lambda: snapshot()["fleet"]["slo_judged"] == 24)  # a second counts when it is over
    summary = snapshot()
    said = await database_sync_to_async(seen)(summary)
    async with served.http.get(f"{served.url}/metrics") as response:
        metrics = await response.text()
    servers = [await served.extra["emulator"].metrics(name) for name in ("a", "b")]

    # Tokens: the ledger, the gateway's metrics, and the servers themselves.
    output, prompt = said.ledger["output"], said.ledger["prompt"]
    assert output == 24 * 12 == sum(each.generation_tokens_total for each in servers)
    assert prompt == sum(each.prompt_tokens_total for each in servers)
    counted = dict.fromkeys(("output", "prompt"), 0.0)
    for kind, value in re.findall(r'pilothouse_tokens_total\{kind="(\w+)"[^}]*\} (\S+)', metrics):
        counted[kind] += float(value)
    assert counted == {"output": output, "prompt": prompt}

    # Demand, capacity and load: page and REST.
    demand = (output + prompt) / (60 * said.minutes)
    assert said.row.demand == pytest.approx(demand)
    assert said.row.capacity == 2 * ABLE
    assert said.row.load == pytest.approx(demand / (2 * ABLE))
    for endpoint in said.row.there:
        rest = said.rest[endpoint.region]
        for name in ("demand_tokens_per_s", "capacity_tokens_per_s"):
            assert getattr(endpoint.load, name) == rest[name]
        assert endpoint.load.load == rest["load_ratio"]
        assert endpoint.load.ready == rest["instances_ready"] == 1
        assert rest["forecast_peak_tokens_per_s"] is endpoint.peak is None
    assert sum(each["demand_tokens_per_s"] for each in said.rest.values()) == pytest.approx(demand)

    # SLO by class: ledger, live summary, page, REST and metrics.
    for row in summary["models"]["m"]["slo_classes"]:
        name, pair = row["slo_class"], (row["met"], row["judged"])
        assert pair == said.ledger_slo[name] == (said.classes[name].met, said.classes[name].judged)
        of_rest = [one for each in said.rest.values() for one in each["slo_classes"] if one["slo_class"] == name]
        assert pair == (sum(one["met"] for one in of_rest), sum(one["judged"] for one in of_rest))
        assert f'pilothouse_slo_met_ratio{{model="m",slo_class="{name}"}} {row["met_ratio"]}' in metrics
    assert len(summary["models"]["m"]["slo_classes"]) == 2

    # Demand, capacity, GPUs and cost of /metrics.
    for name, field in (
        ("demand_tokens_per_second", "demand_tokens_per_s"),
        ("capacity_tokens_per_second", "capacity_tokens_per_s"),
        ("endpoint_gpus", "gpus"),
        ("cost_usd_per_hour", "usd_per_hour"),
    ):
        values = re.findall(rf'pilothouse_{name}{{model="m",region="(\w+)"}} (\S+)', metrics)
        assert {region: float(value) for region, value in values} == {
            region: pytest.approx(each[field], rel=0.05 if name.startswith("demand") else 1e-9)  # minutes pass
            for region, each in said.rest.items()
        }

    # GPUs and cost.
    assert [each["gpus"] for each in said.rest.values()] == [2, 2]
    assert said.usd == said.row.usd_per_hour == sum(each["usd_per_hour"] for each in said.rest.values()) == 8.0
    assert "$8.00" in said.html
