"""Donate instances, reclaim them, and give their GPUs to another model. Each change is an event in its transaction."""

from datetime import datetime

from django.db import transaction
from django.db.models import F

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle.states import Action, ActionError, InstanceState, check_action
from controlplane.fleet.models import Deployment, Donation, DonationState, Instance
from controlplane.fleet.models.spot import OPEN
from controlplane.fleet.spot.selectors import spot_usd_per_hour
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting


@transaction.atomic
def donate(instance: Instance, actor: User | str, reason: str) -> Donation:
    """Move the drained *instance* into the spot pool. Raises ActionError unless it drains."""
    row = services.move(instance, InstanceState.DONATED, actor=actor, reason=reason)
    donation = Donation.objects.create(
        instance=row,
        actor=_name(actor),
        reason=reason[:255],
        spot_usd_per_hour=spot_usd_per_hour(row.deployment),
        donated_at=row.state_changed_at,
    )
    transaction.on_commit(services.notify)
    instance.state = row.state
    return donation


@transaction.atomic
def reclaim(instance: Instance, actor: User | str, reason: str) -> Instance:
    """Take the donated *instance* back for its own model: the gateway evicts what runs there, then it is ready.

    Raises ActionError unless it is donated.
    """
    row = _lock(instance)
    check_action(row.name, Action.RECLAIM, row.state)
    row = services.move(row, InstanceState.RECLAIMING, actor=actor, reason=reason)
    _asked_for(row, row.deployment, row.state_changed_at)
    transaction.on_commit(services.notify)
    instance.state, instance.state_changed_at = row.state, row.state_changed_at
    return instance


@transaction.atomic
def redeploy(donated: Instance, deployment: Deployment, actor: User | str, reason: str) -> Instance:
    """Give the GPUs of the *donated* instance to a new one of *deployment*; return that.

    It starts when the gateway has evicted what runs on *donated*, and that has stopped (`executor.finish_drain`).

    *deployment* is locked (`places.lock`). Raises ActionError unless *donated* is, and has the GPUs that the deployment
    asks for.
    """
    row = _lock(donated)
    check_action(row.name, Action.RECLAIM, row.state)
    own = row.deployment
    if (own.region_id, own.gpu_type_id, own.tensor_parallel) != (
        deployment.region_id,
        deployment.gpu_type_id,
        deployment.tensor_parallel,
    ):
        raise ActionError(
            f"{row.name} has {own.tensor_parallel} x {own.gpu_type} in {own.region}; {deployment} needs "
            f"{deployment.tensor_parallel} x {deployment.gpu_type} in {deployment.region}"
        )
    row = services.move(row, InstanceState.DRAINING, actor=actor, reason=f"redeployed to {deployment.model}: {reason}")
    _asked_for(row, deployment, row.state_changed_at)
    taker = Instance(
        name=places.free_name(deployment), deployment=deployment, launcher=row.launcher, node=row.node, takes_over=row
    )
    taker.full_clean()
    taker.save()
    services.start(taker, actor, f"on the GPUs of {row.name}: {reason}"[:255])
    return taker


def record_evicted(instance_id: int, evicted: int, ended: int) -> None:
    """Count requests of an instance that were queued again, and those that were ended with an error."""
    newest = Donation.objects.filter(instance=instance_id).order_by("-pk").values("pk")[:1]
    Donation.objects.filter(pk__in=list(newest.values_list("pk", flat=True))).update(
        evicted_requests=F("evicted_requests") + evicted, ended_requests=F("ended_requests") + ended
    )


@transaction.atomic
def leave(donated: Instance, actor: User | str, reason: str) -> None:
    """Have the *donated* instance stop: its requests are evicted first."""
    row = services.move(donated, InstanceState.DRAINING, actor=actor, reason=f"to be stopped: {reason}")
    _asked_for(row, None, row.state_changed_at)
    transaction.on_commit(services.notify)


@transaction.atomic
def stop_donating(actor: User | str, reason: str) -> str:
    """Switch `SPOT_DONATE` off for all models, and stop every donated instance. Say so in one sentence.

    Their requests are evicted first; they are not held, so scaling may start them again.
    """
    for setting in Setting.objects.filter(name="SPOT_DONATE").exclude(model=None):
        tuning.reset(setting, actor, reason)
    tuning.change("SPOT_DONATE", False, actor, reason)
    rows = list(Instance.objects.filter(state=InstanceState.DONATED).order_by("pk"))
    for row in rows:
        leave(row, actor, reason)
    return f"Instances are donated no more; {len(rows)} that were donated stop"


def close(row: Instance, to: InstanceState, now: datetime) -> None:
    """End the open donation of *row*, which moves to state *to*. Called by `fleet.services.move` for every move."""
    ends = {
        InstanceState.READY: DonationState.RECLAIMED,
        InstanceState.STOPPED: DonationState.STOPPED,
        InstanceState.FAILED: DonationState.FAILED,
    }
    donation = Donation.objects.filter(instance=row, state__in=OPEN).first() if to in ends else None
    if donation is None:
        return
    other = donation.taken_for_id not in (None, row.deployment_id)
    donation.state = DonationState.REDEPLOYED if other and to == InstanceState.STOPPED else ends[to]
    donation.ended_at = now
    donation.reclaim_at = donation.reclaim_at or now
    donation.save(update_fields=["state", "ended_at", "reclaim_at"])
    record(
        f"spot.{donation.state}",
        row,
        actor=donation.actor,
        after={
            "donation": donation.pk,
            "donated_s": round(donation.donated_s(), 1),
            "offered_usd": None if (offered_usd := donation.offered_usd()) is None else round(offered_usd, 4),
            "reclaim_s": donation.reclaim_s,
            "evicted_requests": donation.evicted_requests,
            "ended_requests": donation.ended_requests,
        },
        reason=donation.reason,
    )


def _asked_for(row: Instance, deployment: Deployment | None, now: datetime) -> None:
    Donation.objects.filter(instance=row, state=DonationState.DONATED).update(
        state=DonationState.RECLAIMING, reclaim_at=now, taken_for=deployment
    )


def _lock(instance: Instance) -> Instance:
    rows = Instance.objects.select_related("deployment__model", "deployment__region", "deployment__gpu_type", "node")
    return rows.select_for_update(of=("self",)).get(pk=instance.pk)


def _name(actor: User | str) -> str:
    return actor if isinstance(actor, str) else actor.get_username()
