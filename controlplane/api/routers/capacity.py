"""`/api/capacity-plans`: the least fleet for a growing demand; and whether the fleet survives the loss of a region."""

from typing import Any

from django.db.models import QuerySet
from django.http import HttpResponse
from django.shortcuts import get_object_or_404
from ninja import Body, Router, Status
from ninja.pagination import paginate

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import Described, Items, NewestFirst, Page, RowSchema
from controlplane.planning.models import CapacityPlan, CapacityState
from controlplane.planning.sizing import selectors, services
from controlplane.planning.sizing.fleet_file import fleet_file
from controlplane.planning.sizing.question import Question

router = Router(auth=VIEWERS, tags=["Capacity"])


class CapacityPlanOut(RowSchema):
    class Meta:
        model = CapacityPlan
        fields = ("id", "asked_at", "phase", "progress", "error", "ended_at")

    state: CapacityState
    question: Question


class CapacityPlanDetail(CapacityPlanOut):
    answer: dict[str, Any]
    """Empty until the first answer, which comes before its check: `fleet`, `gpus`, `usd_per_month`, `offers`, then `check`,
    `frontier` (a point without `usd_per_month` says `why`) and `buy_by`."""


class RegionLossOut(Described):
    region: str
    title: str
    survives: bool
    """Whether every class keeps its target without the region."""
    slo_class: str
    """The class that falls farthest below its target."""
    slo_met_ratio: float | None
    """Its attainment while it is below."""
    below_target_s: float
    without_loss_ratio: float | None
    """Its attainment over the same time with all regions."""


@router.post("/capacity-plans", response={202: CapacityPlanDetail})
def plan_capacity(request: ApiRequest, body: Body[dict[str, Any]]) -> Status[CapacityPlan]:
    """Have a worker find the least fleet, as the body's question asks (`question` of an answer). 422 names the field."""
    user = request.auth.require(Role.OPERATOR)
    try:
        return Status(202, services.ask(body, user))
    except services.Refused as refused:
        field, text = next(iter(refused.fields.items()))
        raise ApiError(422, "invalid", text, field) from refused


@router.get("/capacity-plans", response=Page[CapacityPlanOut])
@paginate(NewestFirst)
def list_capacity_plans(request: ApiRequest) -> QuerySet[CapacityPlan]:
    return CapacityPlan.objects.all()


@router.get("/capacity-plans/{int:number}", response=CapacityPlanDetail)
def get_capacity_plan(request: ApiRequest, number: int) -> CapacityPlan:
    return get_object_or_404(CapacityPlan, pk=number)


@router.get("/capacity-plans/{int:number}/fleet.toml", response={200: str})
def get_capacity_fleet_file(request: ApiRequest, number: int) -> HttpResponse:
    """The planned fleet as a fleet file."""
    row = get_object_or_404(CapacityPlan.objects.exclude(answer={}), pk=number)
    return HttpResponse(fleet_file(row), content_type="application/toml; charset=utf-8")


@router.get("/region-losses", response=Items[RegionLossOut])
def list_region_losses(request: ApiRequest) -> dict[str, Any]:
    """Whether the present fleet survives the loss of each region, by last night's simulation."""
    loss = selectors.newest_loss()
    return {"items": loss.regions if loss else []}
