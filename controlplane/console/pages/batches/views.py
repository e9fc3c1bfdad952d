"""Batches: their progress, and canceling one."""

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import tenants_with_role
from controlplane.batches.models import Batch
from controlplane.batches.services import cancel_batch
from controlplane.console.access.roles import signed_in
from controlplane.console.actions import act_with_reason
from controlplane.console.lists import list_page
from controlplane.events.services import record
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.errors import ApiError
from controlplane.resources.batches import BATCHES


@require_safe
@signed_in
def batches(request: HttpRequest) -> HttpResponseBase:
    managed = set(tenants_with_role(request.user, Role.OPERATOR).values_list("pk", flat=True))
    return list_page(request, BATCHES, managed=managed)


@require_POST
@signed_in
def cancel(request: HttpRequest, pk: int) -> HttpResponse:
    batch = get_object_or_404(Batch, pk=pk, tenant__in=tenants_with_role(request.user, Role.OPERATOR))

    def act(reason: str) -> str:
        try:
            cancel_batch(batch)
        except ApiError as error:
            raise ActionError(error.message) from error
        record("batch.canceled", batch, actor=user_of(request), reason=reason)
        return f"{batch} is being canceled; lines that run finish, and its output stays readable."

    act_with_reason(request, act, f"{batch} was not canceled")
    return redirect("console:batches")
