"""Requests that a user may see, narrowed by the filters of the page."""

from datetime import datetime

from django.contrib.auth.models import AnonymousUser
from django.db.models import QuerySet

from controlplane.accounts.models import User
from controlplane.accounts.selectors import visible_tenants
from controlplane.gateway.models import LedgerRow


def visible_requests(user: User | AnonymousUser) -> QuerySet[LedgerRow]:
    """Requests of the tenants that *user* may see: every one for the fleet's people."""
    return LedgerRow.objects.filter(tenant__in=visible_tenants(user)).select_related("tenant", "api_key")


def filter_requests(
    rows: QuerySet[LedgerRow],
    *,
    model: str = "",
    outcome: str = "",
    tenant: str = "",
    instance: str = "",
    slo_class: str = "",
    request_id: str = "",
    since: datetime | None = None,
) -> QuerySet[LedgerRow]:
    """Narrow *rows*; an empty value does not narrow. *request_id* is looked for as a beginning."""
    exact = {"model": model, "outcome": outcome, "tenant__name": tenant, "instance": instance, "slo_class": slo_class}
    rows = rows.filter(**{name: value for name, value in exact.items() if value})
    if request_id:
        rows = rows.filter(request_id__startswith=request_id)
    if since:
        rows = rows.filter(arrived_at__gte=since)
    return rows
