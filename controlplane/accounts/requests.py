"""Signed-in users of requests."""

from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

from controlplane.accounts.models import Role, User


class NotedRequest(HttpRequest):
    """Request with attributes set by the admin and the console."""

    fleet_role: Role | None
    audit_before: dict[str, Any]
    new_secret: str


def user_of(request: HttpRequest) -> User:
    """Return the signed-in user. Raises PermissionDenied without one."""
    if not request.user.is_authenticated:
        raise PermissionDenied
    return request.user
