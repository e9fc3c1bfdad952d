"""`/api`: load of endpoints, scaling policies, plans and moves. Viewers read, operators decide."""

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_list, add_operations, schema_of
from controlplane.api.routers.system import live_endpoints
from controlplane.api.schemas import Described, Items, Strict
from controlplane.fleet.minimums import minimums
from controlplane.fleet.models import Model
from controlplane.gateway.selectors import attainments
from controlplane.planning import bundles, capacity, selectors, services
from controlplane.planning.models import (
    PolicyMode,
    ScalingPlan,
    ScalingPolicy,
    mode_of,
)
from controlplane.planning.outlook import peaks
from controlplane.resources.plans import MOVES, PLANS
from controlplane.resources.resource import Column

router = Router(auth=VIEWERS, tags=["Scaling"])


class ClassServiceOut(Described):
    slo_class: str
    met: int
    judged: int
    met_ratio: float | None
    objective_ratio: float
    """Share promised by the class's percentile."""
    burn: float | None
    """Misses divided by those the objective allows; above 1 the error budget runs out early."""


class LoadOut(Described):
    """Tokens are prompt plus output, of interactive and deferred SLO classes, as planners count."""

    instances_ready: int
    """Instances that take requests now."""
    gpus: int
    """GPUs of instances that serve or are starting."""
    usd_per_hour: float
    demand_tokens_per_s: float | None
    """Demand from callers of the region over the last ten minutes; null while nothing is counted."""
    capacity_tokens_per_s: float | None
    """Capacity of ready instances in the newest plan; null without a plan."""
    load_ratio: float | None


class EndpointOut(LoadOut):
    """One model in one region."""

    model: str
    region: str
    min_instances: int
    min_instances_ready: int
    """Of these, those that have to take requests now; others are in maintenance, or asleep in a swap group."""
    forecast_peak_tokens_per_s: float | None
    """Highest window of the forecast, in the unit and classes of demand; null without a forecast."""
    slo_classes: list[ClassServiceOut]
    """Last hour, by serving region."""


class EndpointsOut(Items[EndpointOut]):
    total: LoadOut
    """Of those listed. Demand and capacity leave out models without output, unless all are such."""


class PolicyOut(Described):
    model: str
    strategy: str | None
    """Null where the model has no policy: only the reactive floor scales it."""
    mode: PolicyMode
    parameters: dict[str, Any]
    changed_at: datetime | None
    bundle: str
    """Policy bundle: router, order, strategy, forecaster and length model; `custom` where the values match none."""
    nearest: str
    """Bundle that differs in the fewest values."""
    values: dict[str, Any]
    """All that a bundle sets."""
    differs: dict[str, Any]
    """Values of the nearest bundle that differ, by name."""


class PolicyIn(Strict):
    """What is not given stays."""

    bundle: str = Field("", max_length=40)
    """Name of a bundle to apply whole; the mode stays."""
    strategy: str | None = Field(None, max_length=40)
    mode: PolicyMode | None = None
    parameters: dict[str, Any] | None = None
    """Strategy parameters by name; omitted ones have their defaults."""
    routing_policy: str | None = None
    ordering_policy: str | None = None
    FORECASTER: str | None = None
    reason: str = Field("", max_length=255)


PlanOut = schema_of(PLANS, "PlanOut")
PlanDetail = schema_of(
    PLANS,
    "PlanDetail",
    "",
    Column("inputs", type=dict[str, Any], about="Demand, capability, prices and bounds that it was made from."),
)
MoveOut = schema_of(MOVES, "MoveOut", "One instance added or taken away by scaling, and why.")


@router.get("/endpoints", response=EndpointsOut)
def list_endpoints(request: ApiRequest, model: str = "", region: str = "") -> dict[str, Any]:
    """Return demand, capacity, load, GPUs, cost and service by SLO class of every endpoint, as the console shows them."""
    now = timezone.now()
    served = attainments(now - timedelta(hours=1))
    loads, expected, least = capacity.endpoint_loads(now, live_endpoints()), peaks(now), minimums()
    listed = {place: load for place, load in loads.items() if model in ("", load.model) and region in ("", load.region)}
    return {
        "items": [
            {
                **_load(load),
                "min_instances": least[place].instances,
                "min_instances_ready": least[place].due,
                "forecast_peak_tokens_per_s": peak.mean if (peak := expected.get(place)) else None,
                "slo_classes": [one.as_dict() for one in sorted(served.get(place, {}).values())],
            }
            for place, load in listed.items()
        ],
        "total": _load(capacity.total(listed.values())),
    }


@router.get("/scaling/policies", response=Items[PolicyOut])
def list_policies(request: ApiRequest, model: str = "") -> dict[str, Any]:
    """Return the scaling policy and the bundle of each active model, or of one."""
    known = [(row, policy) for row, policy in selectors.policies() if model in ("", row.name)]
    present = bundles.presents([row for row, _ in known])
    return {"items": [_policy(policy, present[row.pk]) for row, policy in known]}


@router.patch("/scaling/policies/{name:model}", response=PolicyOut)
@transaction.atomic
def change_policy(request: ApiRequest, model: str, body: PolicyIn) -> dict[str, Any]:
    """Change the policy of *model* from the next decision, without a restart. Plans awaiting approval under another strategy
    or mode are superseded.

    In mode `auto`, instances move without approval; try `shadow` first to see the effect.
    """
    user = request.auth.require(Role.OPERATOR)
    row = get_object_or_404(Model, name=model, active=True)
    if body.bundle:
        services.switch_bundle(row, body.bundle, user, body.reason)
    parts = body.model_dump(exclude={"reason", "bundle", "mode", "parameters"}, exclude_none=True)
    if parts:
        services.switch_parts(row, parts, user, body.reason)
    policy = ScalingPolicy.objects.filter(model=row).first()
    if body.mode is not None or body.parameters is not None:
        if policy is None:
            raise ApiError(422, "invalid", f"{row} has no strategy yet.", "strategy")
        parameters = policy.parameters if body.parameters is None else body.parameters
        policy = services.set_policy(row, policy.strategy, body.mode or policy.mode, parameters, user, body.reason)
    row.refresh_from_db()
    return _policy(policy, bundles.present(row))


add_list(
    router,
    PLANS,
    PlanOut,
    "Scaling plans, newest first; `/api/scaling/plans/{id}` has the inputs too.",
    path="/scaling/plans",
    leave_out=("inputs",),
)


@router.get("/scaling/plans/{int:plan_id}", response=PlanDetail)
def get_plan(request: ApiRequest, plan_id: int) -> ScalingPlan:
    return get_object_or_404(selectors.plans(), pk=plan_id)


add_operations(router, PLANS, PlanDetail, "/scaling/plans/{int:pk}")
add_list(
    router,
    MOVES,
    MoveOut,
    "Instances that scaling added or took away, newest first, each with its reason.",
    path="/scaling/moves",
)


def _load(load: capacity.EndpointLoad) -> dict[str, Any]:
    return asdict(load) | {"instances_ready": load.ready, "load_ratio": load.load}


def _policy(policy: ScalingPolicy | None, present: bundles.Present) -> dict[str, Any]:
    names = ("strategy", "parameters", "changed_at")
    return {
        "model": present.model.name,
        "mode": mode_of(policy),
        **({name: getattr(policy, name) for name in names} if policy else dict.fromkeys(names) | {"parameters": {}}),
        "bundle": present.name,
        "nearest": present.nearest.name,
        "values": present.values,
        "differs": {each.what: each.bundled for each in present.differences(present.nearest)},
    }
