"""Keys and budgets: the keys with theirs, a new one (its secret is shown once), and the budgets of tenants and models."""

from collections import defaultdict
from typing import Any

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.formats import date_format
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.accounts.models import ApiKey, BudgetKind, Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import manageable_api_keys, tenants_with_managed_keys
from controlplane.accounts.services import SERVICE_KEY_DAYS, allow_models, create_api_key, expiry_after
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, action
from controlplane.console.editing import edit
from controlplane.console.lists import list_page, viewer_of
from controlplane.console.pages.keys import examples
from controlplane.fleet.inventory import services as inventory
from controlplane.fleet.inventory.kinds import BUDGET
from controlplane.fleet.selectors import allowed_models, names_to_ask_for
from controlplane.resources.budgets import BUDGETS
from controlplane.resources.forms import BudgetForm
from controlplane.resources.keys import KEYS
from controlplane.usage.budgets import used_share


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
@sensitive_variables("secret")
def keys(request: HttpRequest) -> HttpResponseBase:
    """Show the lists; a POST creates a key and answers with its secret, which is shown only then, or edits a budget."""
    viewer = viewer_of(request)
    if (request.GET.get("table"), request.GET.get("format")) == ("budgets", "csv"):
        return BUDGETS.csv(BUDGETS.rows(viewer), viewer.sees_fleet)
    editing = edit(request, BUDGETS, BudgetForm) if "edit" in request.GET else None
    if isinstance(editing, HttpResponse):
        return editing
    managed = list(tenants_with_managed_keys(request.user).filter(active=True))
    errors: dict[str, list[str]] = {}
    if request.method == "POST" and editing is None:
        tenant = next((tenant for tenant in managed if str(tenant.pk) == request.POST.get("tenant")), None)
        if tenant is None:
            raise PermissionDenied("Only operators and admins of a tenant make its keys.")
        role, days, usd = (request.POST.get(name, "") for name in ("role", "days", "usd"))
        try:
            with transaction.atomic():
                key, secret = create_api_key(
                    tenant,
                    request.POST.get("name", ""),
                    user_of(request),
                    expires_at=expiry_after(days),
                    role=Role(role) if role in Role.values else None,
                    allowed_models=allowed_models(request.POST.getlist("allowed_models"), tenant.pk),
                )
                if usd:
                    if not may(request, Role.ADMIN):
                        raise PermissionDenied("Only admins of the fleet give budgets.")
                    limits = {"api_key": key.prefix, "kind": BudgetKind.USD, "hard": usd}
                    inventory.create(BUDGET, limits, user_of(request), "created with its key")
        except ValidationError as error:
            errors = error.message_dict
        else:
            return created(request, key, secret)
    return list_page(
        request,
        KEYS,
        status=422 if errors else 200,
        managed=managed,
        manageable=set(manageable_api_keys(request.user).values_list("pk", flat=True)) if managed else set(),
        errors=errors,
        given=request.POST or {"name": f"{request.user.get_username()}, {date_format(timezone.localdate(), 'j M Y')}"},
        chosen=request.POST.getlist("allowed_models"),
        names=sorted(names_to_ask_for(*(tenant.pk for tenant in managed))) if managed else [],
        roles=[role for role in Role if may(request, role)],
        operating=[str(tenant) for tenant in managed if tenant.operates_fleet],
        service_days=SERVICE_KEY_DAYS,
        editing=editing,
        **_budgets(request),
    )


@require_safe
@login_required
def api_docs(request: HttpRequest) -> HttpResponse:
    """The operations of REST; who may make service keys makes one there."""
    operating = tenants_with_managed_keys(request.user).filter(active=True, operates_fleet=True).first()
    return render(request, "console/api_docs.html", {"operating": operating, "service_days": SERVICE_KEY_DAYS})


def _budgets(request: HttpRequest) -> dict[str, Any]:
    """Return the budgets of keys, by key with the used share of each, and all others."""
    viewer, now = viewer_of(request), timezone.now()
    of_keys: dict[int, list[dict[str, Any]]] = defaultdict(list)
    others = []
    for row in BUDGETS.rows(viewer):
        if row.api_key_id is None:
            others.append(row)
        else:
            of_keys[row.api_key_id].append({"budget": row, "share": used_share(row, now)})
    return {"key_budgets": of_keys, "budgets": others, "budget_columns": BUDGETS.page_columns(viewer)}


@sensitive_variables("secret", "context")
def created(request: HttpRequest, key: ApiKey, secret: str) -> HttpResponse:
    """Show the secret of a new key; `never_cache` keeps it out of every store."""
    model, base_url = examples.model_to_try(), request.build_absolute_uri("/").rstrip("/")
    context: dict[str, object] = {"key": key, "secret": secret}
    if key.role is not None:
        context |= {"served": True, "curl": examples.fleet_curl(base_url, secret)}
        context["python"] = examples.fleet_python(base_url, secret)
    else:
        context |= {
            "served": model != examples.NO_MODEL,
            "curl": examples.curl(base_url, secret, key.tenant, model),
            "python": examples.python(base_url, secret, key.tenant, model),
        }
    return render(request, "console/keys/key_created.html", context)


@action(
    None,
    lambda request: manageable_api_keys(request.user),
    page="console:keys",
    unchanged="{row.name} was not changed",
)
def models(form: ActionForm, key: ApiKey) -> str:
    """Set the models that requests with a key may ask for."""
    names = allow_models(
        key,
        allowed_models(form.fields.getlist("allowed_models"), key.tenant_id),
        form.user,
        form.reason,
    ).allowed_models
    return f"{key.name} may ask for {', '.join(names) if names else 'all models'}; requests follow within seconds."
