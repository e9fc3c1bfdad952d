"""Failures in a row, the back-off between restarts, and crash loops."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.fleet import services
from controlplane.fleet.lifecycle import restarts
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance

pytestmark = pytest.mark.django_db
S = InstanceState


def fail(instance, reason="no answer"):
    services.move(instance, S.FAILED, actor="gateway", reason=reason)
    instance.refresh_from_db()


def again(instance, ready_for=timedelta(0)):
    Instance.objects.filter(pk=instance.pk).update(state=S.READY, state_changed_at=timezone.now() - ready_for)


def test_waits_double_up_to_the_longest():
    waits = [restarts.backoff(failures).total_seconds() for failures in range(1, 9)]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    assert restarts.backoff(10_000) == restarts.LONGEST


def test_each_failure_counts_and_the_third_is_a_crash_loop(make_instance):
    instance = make_instance()
    for count in (1, 2):
        fail(instance)
        assert (instance.failures, instance.state_reason) == (count, "no answer")
        again(instance)
    assert not Event.objects.filter(kind="instance.crash_loop").exists()
    fail(instance, "the server ended while loading")
    said = "Crash loop: failed 3 times in a row, the next start waits 20 s. the server ended while loading"
    assert (instance.failures, instance.state_reason) == (3, said)
    event = Event.objects.get(kind="instance.crash_loop")
    assert (event.subject, event.severity, event.reason) == (instance.name, Severity.CRITICAL, said)
    again(instance)
    fail(instance)
    assert Event.objects.filter(kind="instance.crash_loop").count() == 1  # it was said
    assert instance.state_reason.startswith("Crash loop: failed 4 times in a row, the next start waits 40 s.")


def test_a_settled_instance_resets_the_count(make_instance):
    instance = make_instance(failures=5)
    again(instance, restarts.SETTLED)
    fail(instance)
    assert (instance.failures, instance.state_reason) == (1, "no answer")


def test_loading_for_long_is_no_settled_life(make_instance):
    instance = make_instance(state=S.LOADING, failures=1)
    Instance.objects.update(state_changed_at=timezone.now() - 2 * restarts.SETTLED)
    fail(instance)
    assert instance.failures == 2


def test_an_operators_start_resets_the_count(make_instance, operator):
    by_hand, by_floor = make_instance(state=S.FAILED, failures=5), make_instance(state=S.FAILED, failures=5)
    services.start(by_hand, operator, "the driver is replaced")
    services.start(by_floor, "safety autoscaler", "below the minimum")
    assert [Instance.objects.get(pk=row.pk).failures for row in (by_hand, by_floor)] == [0, 5]


def test_when_it_is_due(make_instance):
    instance = make_instance(state=S.FAILED, failures=2)
    assert not restarts.is_due(instance)
    instance.state_changed_at = timezone.now() - timedelta(seconds=10)
    assert restarts.is_due(instance)
