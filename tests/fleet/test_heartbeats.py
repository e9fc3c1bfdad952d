"""What heartbeats find out is written only where the instance is still the one that was heard of."""

import pytest

from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
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
