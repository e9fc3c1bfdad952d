"""Shards of models: who owns each, handing one over, and which models are in one shard.

Where regions have zones, a shard has an owner in each zone that serves its models: `shard 1 in eu` beside `shard 1`.
"""

from collections import defaultdict
from itertools import count

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q

from controlplane.accounts.models import User
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Instance, Model, Owner

SHARD, IN = "shard ", " in "
"""Of which the roles of the owners of shards are made."""


def is_shard(role: str) -> bool:
    return role.startswith(SHARD)


def in_zone(shard: str, zone: str) -> str:
    """Return the role of the owner of *shard* in *zone*."""
    return f"{shard}{IN}{zone}" if shard and zone else shard


def shard_of(role: str) -> str:
    return role.partition(IN)[0]


def zone_of(role: str) -> str:
    return role.partition(IN)[2]


def models_by_role() -> dict[str, list[str]]:
    """Return the names of the active models of each role that is needed."""
    models = defaultdict[str, list[str]](list)
    rows = Model.objects.filter(active=True).values_list("name", "shard", "deployments__region__zone")
    for name, shard, zone in rows.order_by("name").distinct():
        role = f"{SHARD}{shard}"
        models[role] += []  # there also where all regions have zones
        models[in_zone(role, zone or "")].append(name)
    return dict(models)


def owners() -> list[Owner]:
    """Return the rows of shards, each with the names of its `models`, in the order of their zones and numbers."""
    models, rows = models_by_role(), list(Owner.objects.judged().filter(role__startswith=SHARD))
    for row in rows:
        vars(row)["models"] = models.get(row.role, [])
    return sorted(rows, key=lambda row: (zone_of(row.role), _number(row.role)))


def _number(role: str) -> int:
    return int(shard_of(role).removeprefix(SHARD))


@transaction.atomic
def hand_over(row: Owner, actor: User, reason: str) -> str:
    """Have the owner of *row* leave it to a process that stands by. Raises ActionError where there is none."""
    free = Owner.objects.judged().filter(Q(owned=True, contested=True), pk=row.pk, moves=False)
    if not free.update(moves=True):
        row = Owner.objects.judged().get(pk=row.pk)
        if row.moves:
            raise ActionError(f"{row.name} hands {row.role} over already")
        if not row.owned:
            raise ActionError(f"Nobody owns {row.role}: the next process that wants it takes it")
        raise ActionError(f"No process stands by for {row.role}: start another dispatcher first")
    record("shard.moved", row, actor=actor, before={"owner": row.name, "epoch": row.epoch}, reason=reason)
    return f"{row.name} hands {row.role} over to a process that stands by."


def numbers() -> set[int]:
    """Return the numbers of the shards that there are."""
    models = Model.objects.order_by().values_list("shard", flat=True).distinct()
    roles = Owner.objects.filter(role__startswith=SHARD).values_list("role", flat=True)
    return {1, *models, *map(_number, roles)}


def bound_to(model: Model) -> dict[Model, str]:
    """Return the models that are in one shard with *model*, each with the reason."""
    groups = Instance.objects.exclude(swap_group=None).filter(deployment__model=model).values("swap_group")
    sharing = Model.objects.filter(deployments__instances__swap_group__in=groups).exclude(pk=model.pk)
    bound = dict.fromkeys(sharing.distinct(), "shares GPUs with it")
    bound |= dict.fromkeys(Model.objects.filter(fallback=model), "falls back to it")
    return bound | ({model.fallback: "is its fallback"} if model.fallback else {})


def together(model: Model) -> list[Model]:
    """Return *model* and all that are in one shard with it."""
    found = [model]
    for each in found:
        found += [other for other in bound_to(each) if other not in found]
    return found


def check(*models: Model) -> None:
    """Raise ValidationError unless each of *models* is in a shard that there is, or the next, as is what is bound to it."""
    for model in Model.objects.filter(pk__in=[model.pk for model in models]).select_related("fallback"):
        if model.shard - 1 not in {0} | (known := numbers()):
            new = next(number for number in count(1) if number not in known)
            raise ValidationError({"shard": f"There is no shard {model.shard - 1}: the next new one is shard {new}."})
        for other, how in bound_to(model).items():
            if other.shard != model.shard:
                text = f"{other} {how} and is in shard {other.shard}, {model} in shard {model.shard}: change both together."
                raise ValidationError({"shard": text})
