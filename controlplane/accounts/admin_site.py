"""The admin site, and the rights of each fleet role there.

Rights follow `User.fleet_role` alone, not Django's permission rows: viewers and operators read, admins edit.
Signing in is the console's business.
"""

from typing import TypeVar, cast

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import resolve_url
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.utils.text import capfirst

from controlplane.accounts.models import Role
from controlplane.accounts.requests import NotedRequest

Row = TypeVar("Row", bound=Model)


def has_role(request: HttpRequest, least: Role) -> bool:
    """Return whether the user has at least *least* over the fleet; cached, since pages ask dozens of times."""
    noted = cast(NotedRequest, request)
    if not hasattr(request, "fleet_role"):
        user = request.user
        noted.fleet_role = user.fleet_role() if user.is_authenticated and user.is_active else None
    return noted.fleet_role is not None and noted.fleet_role.rank >= least.rank


class FleetAdminSite(admin.AdminSite):
    """Django's admin for fleet users."""

    site_header = site_title = "Pilothouse"
    index_title = "Inventory"
    enable_nav_sidebar = True

    def has_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.VIEWER)

    def login(self, request: HttpRequest, extra_context: dict[str, object] | None = None) -> HttpResponse:
        """Send visitors to the console's sign-in page; people signed in without a fleet role are refused."""
        wanted = request.GET.get("next", "")
        if not url_has_allowed_host_and_scheme(
            wanted, allowed_hosts={request.get_host()}, require_https=request.is_secure()
        ):
            wanted = reverse("admin:index", current_app=self.name)
        if self.has_permission(request):
            return HttpResponseRedirect(wanted)
        if request.user.is_authenticated:
            raise PermissionDenied("The admin is for members of a tenant that operates the fleet.")
        return redirect_to_login(wanted, resolve_url(settings.LOGIN_URL))


class RoleAdmin(admin.ModelAdmin[Row]):
    """Admin page that the fleet's people read and admins edit."""

    list_per_page = 50
    save_on_top = False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, object] | None = None) -> HttpResponse:
        title = capfirst(self.model._meta.verbose_name_plural)
        return super().changelist_view(request, {"title": title} | (extra_context or {}))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.VIEWER)

    def has_view_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return has_role(request, Role.VIEWER)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return has_role(request, Role.ADMIN)

    def has_change_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return has_role(request, Role.ADMIN)

    def has_delete_permission(self, request: HttpRequest, obj: Row | None = None) -> bool:
        return has_role(request, Role.ADMIN)
