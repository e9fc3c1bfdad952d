"""Authentication of callers: a session cookie (CSRF token on every write), a tenant's API key or a service key."""

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from ninja.errors import AuthenticationError
from ninja.security import APIKeyCookie, HttpBearer

from controlplane.accounts.models import ApiKey, Role, Tenant, User, hash_secret
from controlplane.accounts.requests import user_of
from controlplane.accounts.selectors import visible_tenants
from controlplane.api.errors import ApiError
from controlplane.database import ERRORS

LAST_USED_EVERY = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated caller: a signed-in *user*, a tenant's *key* (read-only, sees what the tenant's users see), or both for
    a service key, which acts as its account.
    """

    user: User | None = None
    key: ApiKey | None = None
    fleet_role: Role | None = None

    def check(self, least: Role) -> None:
        """Raise ApiError 403 unless the caller has at least *least* over the fleet."""
        if self.fleet_role is None or self.fleet_role.rank < least.rank:
            raise ApiError(403, "forbidden", f"This needs the role {least} over the fleet.")

    def require(self, least: Role) -> User:
        """Return the acting user. Raise ApiError 403 below role *least* over the fleet."""
        self.check(least)
        if self.user is None:
            raise ApiError(
                403, "forbidden", f"This needs a service key with the role {least}; a tenant's key only reads."
            )
        return self.user

    @property
    def person(self) -> User:
        """Return the user of a session. Raise ApiError 403 for a key."""
        if self.user is None or self.key is not None:
            raise ApiError(403, "forbidden", "This is for people, not for keys.")
        return self.user

    @property
    def sees_fleet(self) -> bool:
        return self.fleet_role is not None

    def tenants(self) -> QuerySet[Tenant]:
        """Tenants whose keys, requests and usage are visible to the caller."""
        if self.sees_fleet:
            return Tenant.objects.all()
        return Tenant.objects.filter(pk=self.key.tenant_id) if self.key is not None else visible_tenants(self.person)


class ApiRequest(HttpRequest):
    """Request with an authenticated caller."""

    auth: Caller


class SessionCaller(APIKeyCookie):
    """Authenticate a console session of a user with at least role *least* over the fleet.

    Ninja checks the CSRF token of every request that is not read-only, once there is a session.
    """

    param_name = "sessionid"
    openapi_name = "session"

    def __init__(self, least: Role | None = None) -> None:
        super().__init__()
        self.least = least

    def __call__(self, request: HttpRequest) -> Caller | None:
        if request.headers.get("Authorization", "").lower().startswith("bearer "):
            KeyCaller()(request)  # 401 for what is no valid key
            raise ApiError(403, "forbidden", "This is for people, not for keys.")
        return super().__call__(request) if request.user.is_authenticated and request.user.is_active else None

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller:
        user = user_of(request)
        caller = Caller(user=user, fleet_role=user.fleet_role())
        if self.least is not None:
            caller.check(self.least)
        return caller


class KeyCaller(HttpBearer):
    """Authenticate `Authorization: Bearer ph_…`, as on `/v1`. Cookies are ignored when a key is sent.

    A key of an operator tenant reads as a viewer; a service key has its own role.
    """

    openapi_name = "api_key"

    def __init__(self, least: Role | None = None) -> None:
        super().__init__()
        self.least = least

    def authenticate(self, request: HttpRequest, token: str) -> Caller:
        key = ApiKey.objects.select_related("tenant", "account").filter(sha256=hash_secret(token)).first()
        if key is None or not key.usable or not key.tenant.active or (key.account and not key.account.is_active):
            raise AuthenticationError
        now = timezone.now()
        if key.last_used_at is None or key.last_used_at < now - LAST_USED_EVERY:
            with contextlib.suppress(*ERRORS):  # a read needs no write
                ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        caller = Caller(key.account, key, (key.role or Role.VIEWER) if key.tenant.operates_fleet else None)
        if self.least is not None:
            caller.check(self.least)
        return caller


PEOPLE: list[Any] = [SessionCaller()]
VIEWERS: list[Any] = [KeyCaller(Role.VIEWER), SessionCaller(Role.VIEWER)]
PEOPLE_AND_KEYS: list[Any] = [KeyCaller(), SessionCaller()]
