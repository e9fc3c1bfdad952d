"""Batches: will each be done by its deadline, what waits, and canceling one."""

from collections.abc import Sequence
from typing import Any, cast

from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.accounts.models import ApiKey, Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import tenants_with_role
from controlplane.batches import services
from controlplane.batches.api import content_of
from controlplane.batches.budgets import spent_budgets
from controlplane.batches.models import ENDED, Batch, BatchStatus, Purpose
from controlplane.batches.selectors import keys_for_batches, running
from controlplane.batches.validation import first_url
from controlplane.console.access.roles import signed_in
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.live import batches as live
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import fleet_figures
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.gateway.errors import ApiError, invalid
from controlplane.resources.batches import BATCHES, visible_batches

FILES = {"input": "input_file", "output": "output_file", "errors": "error_file"}


@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
def batches(request: HttpRequest) -> HttpResponseBase:
    """The list: first those that run, the least slack first, then those that ended, newest first. A POST creates a batch."""
    viewer = viewer_of(request)
    keys, refused = keys_for_batches(user_of(request)), None
    if request.method == "POST":
        try:
            return redirect("console:batch", created(request, keys).public_id)
        except ApiError as error:
            refused = error
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
        status=refused.status if refused else 200,
        refused=refused,
        keys=keys,
        windows=range(24, 0, -1),
        **live.verdict(reading),
    )


def created(request: HttpRequest, keys: Sequence[ApiKey]) -> Batch:
    """Return the batch of an uploaded file, by one of *keys*. Raises ApiError for what cannot be."""
    file, given = request.FILES.get("file"), request.POST.get("key", "")
    key = next((one for one in keys if str(one.pk) == given), None)
    if key is None:
        raise invalid("Choose a key: the batch has its tenant, models and budgets.", "key")
    if file is None:
        raise invalid("Choose a JSONL file, a request on each line.", "file")
    url = first_url(file)
    stored = services.create_file(key.tenant, file, file.name or "", Purpose.BATCH)
    try:
        return services.create_batch(key, stored, url, f"{request.POST.get('hours', '24')}h")
    except ApiError:
        services.delete_file(stored)
        raise


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
