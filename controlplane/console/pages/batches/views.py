"""Batches: will each be done by its deadline, what waits, and canceling one."""

from typing import Any, cast

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import tenants_with_role
from controlplane.batches.api import content_of
from controlplane.batches.budgets import spent_budgets
from controlplane.batches.models import ENDED, Batch, BatchStatus
from controlplane.batches.selectors import running
from controlplane.console.access.roles import signed_in
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.live import batches as live
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import fleet_figures
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.gateway.errors import ApiError
from controlplane.resources.batches import BATCHES, visible_batches

FILES = {"input": "input_file", "output": "output_file", "errors": "error_file"}


@require_safe
@signed_in
def batches(request: HttpRequest) -> HttpResponseBase:
    """The list: first those that run, the least slack first, then those that ended, newest first."""
    viewer = viewer_of(request)
    state = feed.state()
    rows = cast(QuerySet[Batch], BATCHES.listed(viewer, request.GET)[1])
    reading = live.read(visible_batches(viewer))

    def show(page: list[Batch]) -> list[Batch]:
        ended = [batch for batch in page if batch.status in ENDED]
        return ended if "before" in request.GET else [*running(rows), *ended]

    return list_page(
        request,
        BATCHES,
        show,
        managed=set(tenants_with_role(request.user, Role.OPERATOR).values_list("pk", flat=True)),
        several_tenants=viewer.tenants().count() > 1,
        tiles=live.tiles(reading, fleet_figures(state) if viewer.sees_fleet else None),
        model=model_to_try(),
        spent=spent_budgets(viewer.tenants()),
        **live.verdict(reading),
    )


STATES = dict(BatchStatus.choices) | {"resumed": "Resumed by another process; no line is answered twice"}
"""Words for the moments of a batch."""


def batch_of(request: HttpRequest, public_id: str) -> Batch:
    return get_object_or_404(visible_batches(viewer_of(request)), public_id=public_id)


@require_safe
@signed_in
def batch(request: HttpRequest, public_id: str) -> HttpResponseBase:
    row = batch_of(request, public_id)
    moments = sorted((moment, STATES[name]) for name, moment in row.moments.items())
    context: dict[str, Any] = {
        "row": row,
        "moments": moments,
        "managed": set(tenants_with_role(request.user, Role.OPERATOR).values_list("pk", flat=True)),
    }
    return render(request, "console/batches/batch.html", context)


@require_safe
@signed_in
def file(request: HttpRequest, public_id: str, kind: str) -> HttpResponseBase:
    """`GET /batches/ID/output.jsonl`: the file of a batch, for those who may see its tenant."""
    row = getattr(batch_of(request, public_id), FILES.get(kind, ""), None)
    if row is None:
        raise Http404(f"{public_id} has no file {kind}.")
    try:
        return content_of(row)
    except ApiError as error:
        raise Http404(error.message) from error
