"""Page permissions. Fleet users are viewer, operator or admin; tenant users see only their own data."""

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
    """Return the user's role over the fleet, queried once per request."""
    noted = cast(NotedRequest, request)
    if not hasattr(request, "fleet_role"):
        user = request.user
        noted.fleet_role = user.fleet_role() if user.is_authenticated else None
    return noted.fleet_role


def may(request: HttpRequest, least: Role) -> bool:
    role = role_of(request)
    return role is not None and role.rank >= least.rank


def sees_tenants(request: HttpRequest) -> bool:
    """Return whether the user may see keys and requests of any tenant."""
    return may(request, Role.VIEWER) or visible_tenants(request.user).exists()


def _to_sign_in(request: HttpRequest) -> HttpResponseBase:
    """Redirect to the sign-in, and from there to the page: that of the form, where one was sent after the session's end."""
    return redirect_to_login(request.POST.get("next", "/") if request.method == "POST" else request.get_full_path())


def signed_in(view: View) -> View:
    """Restrict the page to users who see some tenant; others are asked to sign in or to request a role."""

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if not request.user.is_authenticated:
            return _to_sign_in(request)
        if not sees_tenants(request):
            raise PermissionDenied("Your account has no role yet. Ask an admin to add you to a tenant.")
        return view(request, *args, **kwargs)

    return guarded


def fleet_role(least: Role) -> Callable[[View], View]:
    """Restrict the page to users with at least role *least* over the fleet."""

    def decorate(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not may(request, least):
                if not request.user.is_authenticated:
                    return _to_sign_in(request)
                if request.path == "/" and sees_tenants(request):
                    return redirect("console:usage")  # tenant users land here after signing in
                raise PermissionDenied(f"This needs the role {least.label.lower()} over the fleet.")
            return view(request, *args, **kwargs)

        return guarded

    return decorate
