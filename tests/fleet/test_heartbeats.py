"""What heartbeats find out is written only where the instance is still the one that was heard of; whose silence counts."""

import asyncio

import pytest

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import SILENT_S, Heartbeats
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Instance, Launcher


@pytest.fixture
def ready(make_instance):
    """A ready instance, as the gateway sees it."""
    instance = make_instance(name="m-1", state=InstanceState.READY, launcher=Launcher.EMULATED)
    [seen] = inventory.read().instances
    return instance, seen


@pytest.mark.django_db
def test_one_that_is_silent_fails(ready):
    instance, seen = ready
    Heartbeats._write_move(seen, InstanceState.FAILED, "no answer", None)
    instance.refresh_from_db()
    assert (instance.state, instance.failures) == (InstanceState.FAILED, 1)


@pytest.mark.django_db
def test_one_that_is_started_again_does_not_fail_for_its_last_server(ready):
    """Otherwise its start ends with a failed instance, which then waits as long as a crash loop requires."""
    instance, seen = ready
    services.move(instance, InstanceState.STOPPED, actor="test", reason="its server ended")
    services.start(instance, "test", "the stack starts")
    with pytest.raises(ActionError, match="m-1 is provisioning by now, and cannot become failed as ready"):
        Heartbeats._write_move(seen, InstanceState.FAILED, "no answer", None)
    instance.refresh_from_db()
    assert (instance.state, instance.failures) == (InstanceState.PROVISIONING, 0)


@pytest.mark.django_db
def test_one_that_is_ready_again_does_not_either(ready):
    instance, seen = ready
    for state in (InstanceState.STOPPED, InstanceState.PROVISIONING, InstanceState.LOADING, InstanceState.READY):
        services.move(instance, state, actor="test", reason="it was started again")
    with pytest.raises(ActionError, match="ready by now"):
        Heartbeats._write_move(seen, InstanceState.FAILED, "no answer", None)
    assert Instance.objects.get().state == InstanceState.READY


@pytest.mark.parametrize(("stalls", "given_up"), [(False, ["i1"]), (True, [])])
async def test_silence_counts_only_while_this_process_listens(monkeypatch, stalls, given_up):
    """One that has no processor for a while hears nobody: a thousand instances failed for that on a busy machine."""
    now_s, topology, lost = 100.0, Topology(), []
    dispatcher = Dispatcher(topology, lambda: now_s, deliver=lambda record: None)
    instances = [InstanceSpec(n, f"i{n}", f"http://i{n}", "ready", 0.0, "m", "r", "", 4, 1000) for n in range(2)]
    dispatcher.apply_inventory(Inventory({"m": ModelSpec("m", 4096, 0)}, (EndpointSpec("m", "r"),), tuple(instances)))
    heartbeats = Heartbeats(dispatcher, lambda: True, session=lambda: None, refresh=lambda: None, job=None)
    well, silent = topology.replicas.values()
    heartbeats._reading = dict.fromkeys((well, silent))

    async def is_healthy(replica):
        return replica is well and not stalls

    async def give_up(replica, reason, inputs=None):
        lost.append(replica.name)

    async def sleep(seconds, real=asyncio.sleep):
        nonlocal now_s
        now_s += 5.0 if stalls and now_s - 100.0 > 2.0 else seconds
        heartbeats._checking = {one: task for one, task in heartbeats._checking.items() if not task.done()}
        if now_s > 100.0 + 2 * SILENT_S:
            raise asyncio.CancelledError
        await real(0)

    monkeypatch.setattr(heartbeats, "_is_healthy", is_healthy)
    monkeypatch.setattr(heartbeats, "_give_up", give_up)
    for one in (well, silent):
        one.health.heard(now_s)
        one.health.unanswered_s = now_s
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await heartbeats._watch()
    assert sorted(set(lost)) == given_up
