"""Playground: a prompt goes the way of every client's request, and what was decided about it stands beside its answer.

The browser calls `/v1` with a key of a tenant: one that is pasted, or a short-lived one that is made for who may make keys.
Limits, budgets and the ledger are those of the tenant.
"""

from datetime import timedelta
from typing import Final

from django.db.models import Q
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import ApiKey
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import tenants_with_managed_keys
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.console.access.roles import signed_in
from controlplane.console.lists import viewer_of
from controlplane.console.pages.keys.examples import model_to_try
from controlplane.console.pages.requests import placements
from controlplane.fleet.models import Model, SloClass
from controlplane.resources.requests import visible_requests
from controlplane.usage.budgets import usd_per_token
from scheduling.model_task import Task

KEY_LIFETIME: Final = timedelta(minutes=15)


@require_safe
@signed_in
def playground(request: HttpRequest) -> HttpResponse:
    context = {
        "tenants": tenants_with_managed_keys(request.user).filter(active=True),
        "models": Model.objects.filter(task=Task.GENERATE, deployments__active=True).distinct(),
        "model": request.GET.get("model") or model_to_try(),
        "classes": SloClass.objects.filter(tenants__in=viewer_of(request).tenants()).distinct(),
        "minutes": KEY_LIFETIME // timedelta(minutes=1),
    }
    return render(request, "console/playground/playground.html", context)


@never_cache
@require_POST
@signed_in
@sensitive_variables("secret")
def key(request: HttpRequest) -> JsonResponse:
    """Make a key of the tenant for a quarter of an hour, in place of the last one made here."""
    user = user_of(request)
    known = tenants_with_managed_keys(user).filter(active=True)
    tenant = get_object_or_404(known, name=request.POST.get("tenant", "").replace("\0", ""))
    name = f"Playground of {user.get_username()}"[:80]
    for row in ApiKey.objects.filter(tenant=tenant, created_by=user, name=name, revoked_at=None):
        revoke_api_key(row, user, "The playground made another")
    _, secret = create_api_key(tenant, name, user, expires_at=timezone.now() + KEY_LIFETIME)
    return JsonResponse({"key": secret})


@require_safe
@signed_in
def decision(request: HttpRequest) -> HttpResponse:
    """What was decided about the request `?id=`; no content until the ledger has it."""
    asked = request.GET.get("id", "").replace("\0", "")
    row = visible_requests(viewer_of(request)).filter(request_id=asked).order_by("-pk").first() if asked else None
    if row is None:
        return HttpResponse(status=204)
    tokens = row.prompt_tokens + row.output_tokens
    usd = tokens * usd_per_token(Q(tenant_id=row.tenant_id, model=row.model), timezone.now())
    context = {"row": row, "predicted": placements.predicted(row), "usd": usd or None}
    return render(request, "console/playground/decision.html", context)
