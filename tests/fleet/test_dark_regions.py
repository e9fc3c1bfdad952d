"""A dark region: its row, its one event and its one problem, and what automation leaves alone there; and a real one."""

import asyncio
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.utils import timezone

from controlplane.alerts.problems import find, read_known
from controlplane.dispatch.live_fleet.dark_regions import ANSWERS, DARK
from controlplane.dispatch.live_fleet.health import Notice
from controlplane.dispatch.live_fleet.heartbeats import _write
from controlplane.dispatch.live_fleet.inventory import read
from controlplane.events.models import Event
from controlplane.fleet import places
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Region
from controlplane.planning.execution import executor
from controlplane.planning.plans import inventory as planned
from scheduling.control.dark_regions import RETURN_S
from tests.gateway.conftest import do_once, gateway_before, until
from tests.gateway.rows import make_rows
from tests.workers.conftest import FAST

AT = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


@pytest.fixture
def dark(make_instance, deployment, node):
    """The region of a deployment with two ready instances, which lacks one of its minimum."""
    Deployment.objects.update(min_instances=3, max_instances=4)
    rows = [make_instance(state=InstanceState.READY, launcher="emulated", node=node) for _ in range(2)]
    _write([Notice(DARK, deployment.region.name, "2 of 2 are silent", inputs={"at": AT.isoformat()})])
    region = Region.objects.get(pk=deployment.region_id)
    return SimpleNamespace(region=region, rows=rows, deployment=Deployment.objects.get(pk=deployment.pk))


@pytest.mark.django_db
def test_its_row_says_since_when_and_the_inventory_remembers_it(dark):
    assert (dark.region.dark_since, read().dark_regions) == (AT, frozenset({dark.region.name}))
    _write([Notice(DARK, dark.region.name, "of another shard", inputs={"at": timezone.now().isoformat()})])
    assert Region.objects.get(pk=dark.region.pk).dark_since == AT
    _write([Notice(ANSWERS, dark.region.name, "it answers")] * 2)
    assert (Region.objects.get(pk=dark.region.pk).dark_since, read().dark_regions) == (None, frozenset())
    assert [*Event.objects.filter(kind__startswith="region.").order_by("pk").values_list("kind", flat=True)] == [
        DARK,
        ANSWERS,
    ]


@pytest.mark.django_db
def test_it_is_one_problem_and_not_one_of_each_instance_and_endpoint(dark):
    where = {"model": dark.deployment.model.name, "region": dark.region.name}
    silent = [where | {"name": row.name, "status": "unreachable"} for row in dark.rows]
    endpoint = where | {"instances_ready": 0, "waiting": 3, "oldest_wait_s": 1.0}
    found = find({"instances": silent, "endpoints": [endpoint]}, read_known(timezone.now()))
    assert [(one.kind, one.subject, one.severity, one.since) for one in found] == [
        ("region", dark.region.name, "critical", AT)
    ]


@pytest.mark.django_db
def test_automation_neither_starts_nor_removes_anything_there_and_plans_elsewhere(dark, node):
    instance = Instance.objects.get(pk=dark.rows[0].pk)
    assert "is dark since 03:04 UTC" in places.obstacle(instance)
    assert not places.cordon_of(instance), "an operator may"
    assert places.bounds([dark.deployment])[dark.deployment.pk] == (2, 2)
    with pytest.raises(places.NoRoom, match="is dark"):
        places.pick(dark.deployment)
    [spec] = read().endpoints
    assert (spec.missing_instances, spec.max_instances) == (0, 2)
    why = executor.Why("floor", "floor", "test", {}, None)
    Deployment.objects.update(min_instances=0)
    for step in (executor.add, executor.remove):
        with pytest.raises(executor.Refused):
            step(dark.deployment.model.name, dark.region.name, why)
    fleet = planned.read()
    assert (fleet.present.total(), sum(fleet.units.values())) == (0, 0)
    assert {(row.min_instances, row.max_instances) for row in fleet.deployments.values()} == {(0, 0)}


@pytest.mark.django_db
def test_the_page_of_places_and_rest_say_it(dark, client, operator):
    client.force_login(operator)
    assert "2026-01-02" in client.get("/fleet/").content.decode()
    [row] = client.get("/api/regions").json()["items"]
    assert row["dark_since"].startswith("2026-01-02T03:04")


@pytest.fixture
def emulators():
    """Two emulators, a region each."""
    command, found = [sys.executable, "-m", "workers.emulator", "--port", "0"], []
    with ExitStack() as stack:
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.terminate)
            stack.callback(process.send_signal, signal.SIGCONT)
            found.append((process, re.search(r"http://[\w.:]+", process.stdout.readline())[0]))
        yield found


@pytest.mark.services
@pytest.mark.django_db(transaction=True)
async def test_a_frozen_region_is_left_and_returned_to_and_no_request_fails(emulators, monkeypatch):
    import aiohttp

    do_once(monkeypatch)
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.2)
    spec = {"model": "m", "max_num_seqs": 8, "profile": FAST}
    backends, regions = [], []
    async with aiohttp.ClientSession() as http:
        for region, (_, url) in zip(("east", "west"), emulators, strict=True):
            for n in range(2):
                name = f"{region}-{n}"
                async with http.put(f"{url}/emulator/instances/{name}", json=spec) as answer:
                    assert answer.status == 200, await answer.text()
                backends.append(SimpleNamespace(name=name, url=f"{url}/{name}"))
                regions.append(region)
    await database_sync_to_async(make_rows)(backends, regions=regions, max_num_seqs=8, queue_bound=100)
    frozen = emulators[1][0]
    async with gateway_before(backends) as served:
        topology, statuses = served.gateway.dispatching.topology, []

        async def ask():
            async with await served.chat({"X-Region": "west"}, max_tokens=4) as answer:
                statuses.append(answer.status)
                await answer.read()

        await ask()
        frozen.send_signal(signal.SIGSTOP)
        during = [asyncio.create_task(ask()) for _ in range(3)]
        await until(lambda: topology.is_dark("west"))
        await asyncio.gather(*during, ask())
        assert [row.region for row in await served.rows()] == ["west"] + ["east"] * 4
        await asyncio.sleep(0.5)  # its row is written with the next round of heartbeats
        frozen.send_signal(signal.SIGCONT)
        await until(lambda: not topology.is_dark("west"), timeout_s=10 * RETURN_S)
        await ask()
        assert (await served.rows())[-1].region == "west"
        assert statuses == [200] * 6
        await until(lambda: not topology.notices)

    def seen():
        events = Event.objects.filter(kind__in=(DARK, ANSWERS, "instance.moved")).order_by("pk")
        return [*events.values_list("kind", flat=True)], {*Instance.objects.values_list("state", flat=True)}

    assert await database_sync_to_async(seen)() == ([DARK, ANSWERS], {"ready"})
