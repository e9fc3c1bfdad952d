"""Who may open which page. The fleet's people are viewer, operator or admin; a tenant's people see their own things only."""

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import redirect

from controlplane.accounts.models import Role
from controlplane.accounts.requests import NotedRequest
from controlplane.accounts.selectors import visible_tenants

View = Callable[..., HttpResponseBase]


def role_of(request: HttpRequest) -> Role | None:
    """The user's role over the fleet, asked of the database once a request."""
    noted = cast(NotedRequest, request)
    if not hasattr(request, "fleet_role"):
        user = request.user
        noted.fleet_role = user.fleet_role() if user.is_authenticated else None
    return noted.fleet_role


def may(request: HttpRequest, least: Role) -> bool:
    role = role_of(request)
    return role is not None and role.rank >= least.rank


def sees_tenants(request: HttpRequest) -> bool:
    """Whether there is any tenant whose keys and requests the user may see."""
    return may(request, Role.VIEWER) or visible_tenants(request.user).exists()


def signed_in(view: View) -> View:
    """The page is for users who see some tenant; others are asked to sign in, or to have an admin give them a role."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        if not sees_tenants(request):
            raise PermissionDenied("Your account has no role yet. Ask an admin to add you to a tenant.")
        return view(request, *args, **kwargs)

    return guarded


def fleet_role(least: Role) -> Callable[[View], View]:
    """The page is for people with at least the role *least* over the fleet."""

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not may(request, least):
                if not request.user.is_authenticated:
                    return redirect_to_login(request.get_full_path())
                if request.path == "/" and sees_tenants(request):
                    return redirect("console:usage")  # where a tenant's people land after signing in
                raise PermissionDenied(f"This needs the role {least.label.lower()} over the fleet.")
            return view(request, *args, **kwargs)

        return guarded

    return decorate
