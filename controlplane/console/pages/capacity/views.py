"""Capacity: the least fleet for the coming months, and whether the present one survives the loss of a region."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import ActionForm, carried_out
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context
from controlplane.console.pages.capacity.forms import TARGETS, CapacityForm
from controlplane.fleet.models import GpuType, Region
from controlplane.planning.models import CapacityPlan, CapacityState
from controlplane.planning.sizing import selectors, services
from controlplane.planning.sizing.fleet_file import fleet_file
from controlplane.planning.sizing.futures import ask_what_if


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def capacity(request: HttpRequest, pk: int = 0) -> HttpResponse:
    """Show a plan, or the newest, below the question; ask another."""
    row = get_object_or_404(CapacityPlan, pk=pk) if pk else CapacityPlan.objects.first()
    form = CapacityForm.of(row.question) if row else CapacityForm()
    if posted := request.method == "POST" and may(request, Role.OPERATOR):
        form = CapacityForm(request.POST, request.FILES)
        if form.is_valid():
            try:
                asked = services.ask(form.question(), user_of(request))
                return redirect(reverse("console:capacity-plan", args=[asked.pk]) + "#answer")
            except services.Refused as refused:
                form.refuse(refused.fields)
    context = {
        **live_context(feed.state(), f"capacity:{row.pk}" if row else ""),
        "form": form,
        "posted": posted,
        "wrong": [field for field in form if field.errors] if posted else [],
        "targets": TARGETS.values(),
        "plan": row,
        "titles": dict(Region.objects.values_list("name", "title"))
        | dict(GpuType.objects.values_list("name", "title")),
        "answer": _shown(row.answer) if row and row.answer else None,
        "losses": selectors.newest_loss(),
        "earlier": CapacityPlan.objects.exclude(pk=row.pk)[:5] if row else (),
    }
    return render(request, "console/capacity/capacity.html", context, status=422 if posted else 200)


def _shown(answer: dict[str, Any]) -> dict[str, Any]:
    """Return *answer* with offers by model, and the price of one more nine."""
    types = list(dict.fromkeys(one["gpu_type"] for one in answer["offers"]))
    models = list(dict.fromkeys(one["model"] for one in answer["offers"]))
    by_place = {(one["model"], one["gpu_type"]): one for one in answer["offers"]}
    frontier = answer.get("frontier", [])
    usd = {one["attainment"]: one["usd_per_month"] for one in frontier}
    before = {0.99: usd.get(0.9), 0.999: usd.get(0.99)}
    steps = [usd[at] - before[at] if None not in (usd[at], before.get(at)) else None for at in usd]
    by_type: dict[tuple[str, str], dict[str, Any]] = {}
    for one in answer["fleet"]:
        row = by_type.setdefault((one["model"], one["gpu_type"]), one | {"gpus": 0, "usd_per_month": 0.0, "counts": {}})
        row["counts"][one["region"]] = one["instances"]
        row.update({name: row[name] + one[name] for name in ("gpus", "usd_per_month")})
    return answer | {
        "rows": [
            row | {"counts": [row["counts"].get(name, 0) for name in answer["demand"]["regions"]]}
            for row in by_type.values()
        ],
        "types": types,
        "table": [(model, [by_place[model, name] for name in types]) for model in models],
        "steps": list(zip(frontier, steps, strict=True)),
        "gpus_needed": sum(one["needed"] for one in answer["gpus"]),
        "gpus_to_buy": sum(one["buy"] for one in answer["gpus"]),
        "misses": [one for one in answer.get("check", {}).get("shares", []) if not one["holds"]],
        "spot_assumed": any(one["spot_assumed"] and one["needed"] for one in answer["gpus"]),
    }


@require_safe
@fleet_role(Role.VIEWER)
def file(request: HttpRequest, pk: int) -> HttpResponse:
    """Return the fleet file of a plan."""
    row = get_object_or_404(CapacityPlan.objects.exclude(answer={}), pk=pk)
    headers = {"Content-Disposition": f'attachment; filename="capacity-plan-{pk}.toml"'}
    return HttpResponse(fleet_file(row), content_type="application/toml; charset=utf-8", headers=headers)


@require_POST
@fleet_role(Role.OPERATOR)
def what_if(request: HttpRequest, pk: int) -> HttpResponse:
    """Compare the fleet of a plan with the present one in a what-if."""
    row = get_object_or_404(CapacityPlan, pk=pk, state=CapacityState.DONE)
    made: list[int] = []

    def carry_out(form: ActionForm) -> str:
        made.append(ask_what_if(row, form.user).pk)
        return "The planned fleet and the present one are simulated."

    def page() -> str:
        return reverse("console:what-if", args=made) if made else reverse("console:capacity-plan", args=[pk])

    return carried_out(request, carry_out, page, "")
