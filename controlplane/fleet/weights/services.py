"""Pull weights into regions, and note where they are."""

from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Instance, Model, Region, Weights, WeightsState
from controlplane.fleet.weights.selectors import estimate


@transaction.atomic
def pull(model: Model, region: Region, actor: User | str, reason: str) -> Weights:
    """Pull the weights of *model* into *region*; a worker carries it out.

    Raises ActionError where they are, or are coming.
    """
    Model.objects.select_for_update(no_key=True).get(pk=model.pk)
    row = Weights.objects.filter(model=model, region=region).first() or Weights(model=model, region=region)
    if row.pk is not None and row.state != WeightsState.FAILED:
        coming = row.state == WeightsState.PULLING
        raise ActionError(f"The weights of {model} are {'being pulled to' if coming else 'in'} {region} already")
    return _begin(row, actor, reason)


def ask(model: str, region: str, actor: str, reason: str) -> Weights | None:
    """As `pull`, by names and for automation; None where the weights are, are coming, or are not tracked for the model."""
    row = Model.objects.filter(name=model, weights__isnull=False).first()
    if row is None:
        return None
    try:
        return pull(row, Region.objects.get(name=region), actor, reason)
    except ActionError:
        return None


@transaction.atomic
def finish(row: Weights, error: str = "") -> None:
    """Record the end of the pull *row*: the weights are present, or (*error*) it failed."""
    now, began = timezone.now(), row.since
    state = WeightsState.FAILED if error else WeightsState.PRESENT
    changed = Weights.objects.filter(pk=row.pk, state=WeightsState.PULLING).update(
        state=state, since=now, ready_at=None, reason=error[:255] or row.reason
    )
    if changed:
        row.state, row.since = state, now
        record(
            f"weights.{state}",
            row.model,
            actor=row.actor or "fleet worker",
            after={"region": row.region.name, "gigabytes": row.gigabytes, "took_s": (now - began).total_seconds()},
            reason=error or row.reason,
            severity=Severity.WARNING if error else Severity.INFO,
        )


def note_served(instance: Instance) -> None:
    """Record that the weights of *instance*, which has become ready, are in its region."""
    deployment = instance.deployment
    row, created = Weights.objects.get_or_create(
        model=deployment.model,
        region=deployment.region,
        defaults={"actor": instance.name, "reason": "an instance loaded"},
    )
    if not created and row.state != WeightsState.PRESENT:
        Weights.objects.filter(pk=row.pk).update(state=WeightsState.PRESENT, since=timezone.now(), ready_at=None)


def _begin(row: Weights, actor: User | str, reason: str) -> Weights:
    now, expected = timezone.now(), estimate(row.model)
    row.state, row.since, row.ready_at = WeightsState.PULLING, now, now + timedelta(seconds=expected.seconds)
    row.actor = actor if isinstance(actor, str) else actor.get_username()
    row.reason = reason[:255]
    row.save()
    record(
        "weights.pull_requested",
        row.model,
        actor=actor,
        after={
            "region": row.region.name,
            "gigabytes": round(expected.gigabytes, 1),
            "expected_s": round(expected.seconds),
            "usd": round(expected.usd, 2),
        },
        reason=reason,
    )
    transaction.on_commit(services.notify)
    return row
