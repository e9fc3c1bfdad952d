"""API keys: the list, a new one (its secret is shown once), and revoking."""

from datetime import timedelta

from django.core.exceptions import PermissionDenied, ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.utils.formats import date_format
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from controlplane.accounts.models import ApiKey, Role
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import manageable_api_keys, tenants_with_managed_keys
from controlplane.accounts.services import allow_models, create_api_key
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import list_page
from controlplane.console.pages.keys import examples
from controlplane.fleet.selectors import allowed_models
from controlplane.resources.keys import KEYS


@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
@signed_in
@sensitive_variables("secret")
def keys(request: HttpRequest) -> HttpResponseBase:
    """Show the list; a POST creates a key and answers with its secret, which is shown only then."""
    managed = list(tenants_with_managed_keys(request.user).filter(active=True))
    errors: dict[str, list[str]] = {}
    if request.method == "POST":
        tenant = next((tenant for tenant in managed if str(tenant.pk) == request.POST.get("tenant")), None)
        if tenant is None:
            raise PermissionDenied("Only operators and admins of a tenant make its keys.")
        role, days = request.POST.get("role", ""), request.POST.get("days", "")
        try:
            key, secret = create_api_key(
                tenant,
                request.POST.get("name", ""),
                user_of(request),
                expires_at=timezone.now() + timedelta(days=int(days)) if days.isdecimal() and len(days) < 6 else None,
                role=Role(role) if role in Role.values else None,
                allowed_models=allowed_models(request.POST.get("allowed_models", "").split(","), tenant.pk),
            )
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
        roles=[role for role in Role if may(request, role)],
    )


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
        allowed_models(form.fields.get("allowed_models", "").split(","), key.tenant_id),
        form.user,
        form.reason,
    ).allowed_models
    return f"{key.name} may ask for {', '.join(names) if names else 'all models'}; requests follow within seconds."
