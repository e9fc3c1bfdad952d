"""Reads of accounts, limited to what a user may see and manage.

Members of a tenant that operates the fleet act, by their role, on every tenant; other people on their own tenants.
"""

from django.contrib.auth.models import AnonymousUser
from django.db.models import QuerySet

from controlplane.accounts.models import ApiKey, Role, Tenant, User

KEY_MANAGER = Role.OPERATOR  # the least role, in the tenant or over the fleet, that makes and revokes keys


def tenants_with_role(user: User | AnonymousUser, least: Role = Role.VIEWER) -> QuerySet[Tenant]:
    """Return tenants in which *user* has at least the role *least*, by membership or a fleet role."""
    if not user.is_authenticated or not user.is_active:
        return Tenant.objects.none()
    if user.has_fleet_role(least):
        return Tenant.objects.all()
    roles = [role for role in Role if role.rank >= least.rank]
    return Tenant.objects.filter(memberships__user=user, memberships__role__in=roles).distinct()


def visible_tenants(user: User | AnonymousUser) -> QuerySet[Tenant]:
    return tenants_with_role(user, Role.VIEWER)


def tenants_with_managed_keys(user: User | AnonymousUser) -> QuerySet[Tenant]:
    """Return tenants for which *user* may create and revoke API keys."""
    return tenants_with_role(user, KEY_MANAGER)


def visible_api_keys(user: User | AnonymousUser) -> QuerySet[ApiKey]:
    """Return keys visible to *user*: all for fleet users, else those of the user's tenants."""
    return ApiKey.objects.filter(tenant__in=visible_tenants(user)).select_related("tenant", "created_by", "account")


def manageable_api_keys(user: User | AnonymousUser) -> QuerySet[ApiKey]:
    """Return keys that *user* may revoke."""
    managed = tenants_with_managed_keys(user)
    return ApiKey.objects.filter(tenant__in=managed).select_related("tenant", "created_by", "account")
