"""Giving the GPUs of a swap group to another of its instances.

A swap is a row. `advance` looks at what is there and makes its next move: who is awake is put to sleep when nothing runs on
it any more, then the one that is wanted is woken, or started. It may be cut off or repeated at any point: every
command ends with a look, and beat looks every few seconds at all that are in progress. Who is awake is kept by
`fleet.services`, which refuses to wake or start a second one; a server that sleeps is given no request, for that would
hang until it wakes.
"""

from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle.states import AWAKE, ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Swap,
    SwapGroup,
    SwapState,
    Tier,
)
from controlplane.fleet.swaps.selectors import sleeps_to
from scheduling.fleet.sleep_level import DISCARDED, IN_MEMORY

S = InstanceState
ACTOR = "swap"
SLEEP_TRIES = 3
"""Sleeps that may fail in one swap (each waits for what runs, for two minutes); then the server is stopped."""
LIMIT_S = 1800.0
"""A swap that takes longer has failed."""


@transaction.atomic
def request(instance: Instance, actor: User | str, reason: str) -> Swap:
    """Request a swap to *instance*. A repeated request returns the same swap.

    Raises ActionError when it shares none, is awake already, or another swap of the group is in progress.
    """
    group, members = _lock(instance)
    target = members[instance.pk]
    running = group.swaps.filter(state=SwapState.IN_PROGRESS).first()
    if running is not None:
        if running.instance_id == target.pk:
            transaction.on_commit(services.advance_swaps)
            return running
        raise ActionError(f"{group} swaps to {running.instance} now: {target.name} has to wait for it")
    if target.state in AWAKE:
        raise ActionError(f"{target.name} is {target.state}: it has the GPUs of {group}")
    if why := places.cordon_of(target) if isinstance(actor, User) else places.obstacle(target):
        raise ActionError(f"No swap to {target.name}: {why}")
    if target.held:  # who asks for it by hand lifts that
        target.held = ""
        target.save(update_fields=["held", "changed_at"])
    awake = _awake(members)
    swap = Swap.objects.create(
        group=group,
        instance=target,
        gave_way=awake,
        tier=target.tier,
        actor=actor.get_username() if isinstance(actor, User) else actor,
        reason=reason[:255],
        message="Begins within seconds.",
    )
    record(
        "swap.started",
        target,
        actor=actor,
        before={"awake": awake.name if awake else None, "tier": target.tier},
        after={"swap": swap.pk, "group": group.name, "awake": target.name},
        reason=reason,
    )
    transaction.on_commit(services.advance_swaps)
    return swap


@transaction.atomic
def group_of(instance: Instance, actor: User | str, reason: str) -> SwapGroup:
    """Return the swap group of *instance*, whose deployment is locked; a new one if it has none."""
    row = Instance.objects.select_for_update().get(pk=instance.pk)
    if row.swap_group_id is not None:
        return SwapGroup.objects.get(pk=row.swap_group_id)
    taken, number = set(SwapGroup.objects.values_list("name", flat=True)), 1
    while (name := f"{row.deployment.region.name}-{number}") in taken:
        number += 1
    row.swap_group = SwapGroup.objects.create(name=name)
    row.save(update_fields=["swap_group", "changed_at"])
    record("swap.group_created", row, actor=actor, after={"group": name}, reason=reason)
    return row.swap_group


@transaction.atomic
def advance(swap: Swap) -> Swap:
    """Make the next move of *swap* if possible; its row says what it waits for."""
    _, members = _lock(swap.instance)
    row = Swap.objects.select_for_update().get(pk=swap.pk)
    if row.state != SwapState.IN_PROGRESS:
        return row
    target = members[row.instance_id]
    if (timezone.now() - row.started_at).total_seconds() > LIMIT_S:
        _end(row, SwapState.FAILED, f"It is not done after {LIMIT_S / 60:.0f} minutes: {row.message}")
    elif target.state == S.READY:
        _measure(row, target)
        _end(row, SwapState.SUCCEEDED, "")
    else:
        try:
            awake = _awake(members)
            if awake is not None and awake.pk != target.pk:
                row.message = _put_to_sleep(row, awake)
            else:
                _bring_up(row, target)
        except ActionError as error:  # moved meanwhile: retried at the next call
            row.message = f"Waits: {error}."
    row.save()
    return row


def _put_to_sleep(swap: Swap, awake: Instance) -> str:
    """Make the next move for *awake* to leave the GPUs. Return what is waited for."""
    swap.gave_way = awake
    command = services.open_command(awake)
    if command is not None and command.verb in (CommandVerb.SLEEP, CommandVerb.STOP):
        return f"{awake.name} {'stops' if command.verb == CommandVerb.STOP else 'finishes what it runs, then sleeps'}."
    if awake.state not in (S.READY, S.DRAINING):
        return f"{awake.name} is {awake.state}: it can sleep once it is ready."
    tries = awake.commands.filter(
        verb=CommandVerb.SLEEP, state=CommandState.FAILED, created_at__gte=swap.started_at
    ).count()
    if tries >= SLEEP_TRIES and awake.launcher != Launcher.EXTERNAL:
        services.stop(awake, ACTOR, f"{swap}: it cannot be put to sleep")
        swap.sleep_tier = Tier.STOPPED
        return f"{awake.name} could not be put to sleep, so it stops."
    if tries >= SLEEP_TRIES:
        _end(swap, SwapState.FAILED, f"{awake.name} cannot be put to sleep: {_error_of(awake, CommandVerb.SLEEP)}")
        return swap.message
    members = swap.group.instances.select_related("deployment__model")
    swap.sleep_tier = sleeps_to(swap.group, list(members))[awake.pk]
    level = IN_MEMORY if swap.sleep_tier == Tier.CPU else DISCARDED
    services.sleep(awake, ACTOR, f"{swap}: {swap.reason}"[:255], level)
    return f"{awake.name} finishes what it runs, then sleeps."


def _bring_up(swap: Swap, target: Instance) -> None:
    """Take the next step to bring *target* up, once no other member is awake."""
    command = swap.load_command
    if command is not None and command.state == CommandState.FAILED:
        if target.state == S.SLEEPING:  # whether it has the GPUs is not known: its server is ended
            services.move(target, S.FAILED, actor=ACTOR, reason=command.error)
        _end(swap, SwapState.FAILED, f"{target.name} did not come up: {command.error}")
    elif target.state == S.FAILED and command is not None:
        _end(swap, SwapState.FAILED, f"{target.name} did not come up: {target.state_reason}")
    elif target.state in (S.SLEEPING, S.STOPPED, S.FAILED) and command is None:
        _measure_sleep(swap)
        swap.tier = target.tier
        bring = services.wake if target.state == S.SLEEPING else services.start
        swap.load_command = bring(target, ACTOR, f"{swap}: {swap.reason}"[:255])
        swap.message = f"{target.name} {'wakes' if target.state == S.SLEEPING else 'starts'}."
    elif target.state == S.STOPPED:
        _end(swap, SwapState.FAILED, f"{target.name} was stopped on its way up.")
    elif target.startup:
        swap.message = f"{target.name} starts: {target.startup}"


def _measure_sleep(swap: Swap) -> None:
    """Return drain and sleep times of the instance that gave way, from its last sleep in this swap."""
    if swap.gave_way is None:
        return
    commands = swap.gave_way.commands.filter(verb=CommandVerb.SLEEP, state=CommandState.DONE)
    command = commands.filter(created_at__gte=swap.started_at).order_by("-pk").first()
    if command is not None and command.drained_at is not None and command.finished_at is not None:
        swap.drain_s = (command.drained_at - swap.started_at).total_seconds()
        swap.sleep_s = (command.finished_at - command.drained_at).total_seconds()


def _measure(swap: Swap, target: Instance) -> None:
    """Return the time from the start of its command until *target* was ready."""
    command = swap.load_command
    if command is not None and command.started_at is not None:
        swap.load_s = max(0.0, (target.state_changed_at - command.started_at).total_seconds())


def _end(swap: Swap, state: SwapState, message: str) -> None:
    swap.state, swap.ended_at = state, timezone.now()
    total_s = (swap.ended_at - swap.started_at).total_seconds()
    swap.message = message or f"{swap.instance.name} serves after {total_s:.1f} s."
    parts = {"drain_s": swap.drain_s, "sleep_s": swap.sleep_s, "load_s": swap.load_s}
    record(
        f"swap.{state}",
        swap.instance,
        actor=ACTOR,
        before={"awake": swap.gave_way.name if swap.gave_way else None, "tier": swap.tier},
        after={
            "swap": swap.pk,
            "group": swap.group.name,
            "total_s": round(total_s, 3),
            **{name: round(value, 3) for name, value in parts.items() if value is not None},
        },
        reason=swap.message,
        severity=Severity.CRITICAL if state == SwapState.FAILED else Severity.INFO,
    )


def _awake(members: dict[int, Instance]) -> Instance | None:
    return next((row for row in members.values() if row.state in AWAKE), None)


def _error_of(instance: Instance, verb: CommandVerb) -> str:
    failed = InstanceCommand.objects.filter(instance=instance, verb=verb, state=CommandState.FAILED)
    return failed.order_by("-pk").values_list("error", flat=True).first() or "no server can do that for it"


def _lock(instance: Instance) -> tuple[SwapGroup, dict[int, Instance]]:
    """Lock and return the swap group of *instance* and its instances by key. Raises ActionError."""
    if instance.swap_group_id is None:
        raise ActionError(f"{instance.name} shares its GPUs with no other instance")
    members = Instance.objects.filter(swap_group=instance.swap_group_id)
    places.lock(Deployment.objects.filter(pk__in=members.values("deployment")))
    group = SwapGroup.objects.select_for_update().get(pk=instance.swap_group_id)
    rows = group.instances.select_related("deployment__model", "deployment__gpu_type", "swap_group").order_by("pk")
    return group, {row.pk: row for row in rows.select_for_update(of=("self",))}
