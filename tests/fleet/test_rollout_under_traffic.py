"""A bad version is rolled out over an emulated fleet under traffic: no request fails, and it goes back.

Real are the gateway, Redis, the emulated servers and what workers do. The new servers fail a third of their requests.
"""

import asyncio
import re
import subprocess
import sys
from collections import Counter

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings as django_settings
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle import launching
from controlplane.fleet.lifecycle.states import InstanceState as S
from controlplane.fleet.models import (
    CommandState,
    Deployment,
    Instance,
    InstanceCommand,
    Model,
    Node,
    RolloutState,
    SloClass,
)
from controlplane.fleet.rollouts import services as rollouts
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.execution import executor
from tests.gateway.conftest import do_once, gateway_before
from tests.gateway.rows import SECRET
from tests.redis_server import RedisServer
from workers.tasks import fleet as tasks
from workers.tasks.rollouts import advance_rollouts
from workers.vllm.launcher import EmulatedLauncher

pytestmark = [pytest.mark.services, pytest.mark.nightly, pytest.mark.django_db(transaction=True)]
NEW_SEQS = 33
CLIENTS = 6


@pytest.fixture
def redis(monkeypatch):
    server = RedisServer().start()
    monkeypatch.setattr(django_settings, "REDIS_URL", server.url)
    yield server
    server.stop()


@pytest.fixture
def emulator(monkeypatch):
    command = [sys.executable, "-m", "workers.emulator", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = re.search(r"http://[\w.:]+", process.stdout.readline())[0]
        monkeypatch.setattr(tasks, "launcher_for", lambda instance: EmulatedLauncher(url))
        monkeypatch.setattr(launching, "EMULATED_STARTUP_S", 0.0)
        yield url
        process.terminate()


@pytest.fixture
def rows(redis, emulator, make_instance, deployment, node):
    """Two instances that run, and a key."""
    slo_class = SloClass.objects.create(name="interactive", title="Interactive", kind="interactive")
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)
    tenant.slo_classes.add(slo_class)
    ApiKey.objects.create(tenant=tenant, name="test", prefix=SECRET[:11], sha256=hash_secret(SECRET))
    Deployment.objects.update(min_instances=2)
    for name in ("one", "two"):
        services.start(make_instance(state=S.PROVISIONING, name=name, node=node), "test", "begin")
    work()


def work():
    """Do what workers do."""
    for command in InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk"):
        tasks.run_command(command.pk)
    settled = timezone.now() - executor.DRAIN_SETTLE
    Instance.objects.filter(state=S.DRAINING, state_changed_at__gt=settled).update(state_changed_at=settled)
    InstanceCommand.objects.filter(finished_at__isnull=False).update(finished_at=timezone.now() - executor.STOP_REST)
    for row in executor.drained():
        executor.finish_drain(row, 0, executor.PLANNER)


def is_new(row):
    return row.launched_with.get("max_num_seqs") == NEW_SEQS


@pytest.mark.parametrize("gpus", [8, 4], ids=["one more first", "in its place"])
async def test_no_request_fails_and_one_old_instance_is_lost_at_most(rows, emulator, deployment, monkeypatch, gpus):
    do_once(monkeypatch)
    monkeypatch.setattr(django_settings, "FLEET_REFRESH_S", 0.2)
    monkeypatch.setattr(django_settings, "HEARTBEAT_S", 0.2)
    await database_sync_to_async(Node.objects.update)(gpu_count=gpus)
    model = await database_sync_to_async(lambda: Model.objects.get().name)()
    answers, least_old, over = Counter(), 2, False

    async with gateway_before([None, None], aiohttp.ClientSession()) as served:

        async def ask():
            body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
            headers = {"Authorization": f"Bearer {SECRET}"}
            while not over:
                url = f"{served.url}/v1/chat/completions"
                async with served.http.post(url, json=body, headers=headers) as response:
                    await response.read()
                    answers[response.status] += 1

        async def injure():
            """Have new servers fail a third of their requests."""
            for row in await database_sync_to_async(
                lambda: [*filter(is_new, Instance.objects.filter(state=S.LOADING))]
            )():
                fault = {"kind": "errors", "ratio": 0.33}
                async with served.http.post(f"{emulator}/emulator/instances/{row.name}/fault", json=fault) as response:
                    assert response.status == 200, await response.text()

        clients = [asyncio.create_task(ask()) for _ in range(CLIENTS)]
        await database_sync_to_async(Deployment.objects.update)(max_num_seqs=NEW_SEQS)
        rollout = await database_sync_to_async(rollouts.start)(deployment, "test", "a bad version", bake_s=30)
        async with asyncio.timeout(90):
            while rollout.ended_at is None:
                await database_sync_to_async(advance_rollouts)()
                await asyncio.to_thread(work)
                await injure()
                ready = await database_sync_to_async(lambda: [*Instance.objects.filter(state=S.READY)])()
                least_old = min(least_old, sum(not is_new(row) for row in ready))
                await database_sync_to_async(rollout.refresh_from_db)()
                await asyncio.sleep(0.2)
        over = True
        await asyncio.gather(*clients)
        await asyncio.sleep(1.0)  # the ledger is written

    def seen():
        kinds = set(Event.objects.filter(kind__startswith="rollout.").values_list("kind", flat=True))
        failed = LedgerRow.objects.exclude(outcome=Outcome.DONE).count()
        retried = LedgerRow.objects.filter(attempts__gt=1).count()
        return kinds, failed, retried, Deployment.objects.get().max_num_seqs

    kinds, failed, retried, seqs = await database_sync_to_async(seen)()
    print(
        f"{rollout.message} | answers {dict(answers)}, failed {failed}, retried {retried}, old ready at least {least_old}"
    )
    assert rollout.state == RolloutState.ROLLED_BACK, rollout.message
    assert kinds >= {"rollout.started", "rollout.goes_back", "rollout.rolled_back"}
    assert set(answers) == {200}
    assert failed == 0
    assert retried, "by the bad one"
    assert least_old == (2 if gpus == 8 else 1)
    assert seqs != NEW_SEQS
