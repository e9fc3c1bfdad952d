"""Who is asking: a signed-in person (session cookie, CSRF token on every write) or a tenant's API key."""

from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest
from ninja.errors import AuthenticationError
from ninja.security import APIKeyCookie, HttpBearer

from controlplane.accounts.models import ApiKey, Role, Tenant, User, hash_secret
from controlplane.accounts.selectors import visible_tenants
from controlplane.api.errors import ApiError


@dataclass(frozen=True, slots=True)
class Caller:
    """One of *user* and *key* is set. A key sees what its own tenant's members see, and changes nothing."""

    user: User | None = None
    key: ApiKey | None = None
    fleet_role: Role | None = None

    def require(self, least: Role) -> User:
        """The user, if they have at least *least* over the fleet; raises ApiError 403 otherwise."""
        if self.user is None or self.fleet_role is None or self.fleet_role.rank < least.rank:
            raise ApiError(403, "forbidden", f"This needs the role {least} over the fleet.")
        return self.user

    @property
    def person(self) -> User:
        """The user, where no key is let in; raises ApiError 403 for a key."""
        if self.user is None:
            raise ApiError(403, "forbidden", "This is for people, not for keys.")
        return self.user

    @property
    def sees_fleet(self) -> bool:
        return self.fleet_role is not None

    def tenants(self) -> QuerySet[Tenant]:
        """Tenants whose keys, requests and usage the caller may see."""
        if self.key is not None:
            return Tenant.objects.filter(pk=self.key.tenant_id)
        return Tenant.objects.all() if self.sees_fleet else visible_tenants(self.person)

    def api_keys(self) -> QuerySet[ApiKey]:
        return ApiKey.objects.filter(tenant__in=self.tenants()).select_related("tenant", "created_by")


class ApiRequest(HttpRequest):
    """A request that one of the classes below has let in."""

    auth: Caller


class SessionCaller(APIKeyCookie):
    """The console's session, of somebody with at least *least* over the fleet.

    Ninja checks the CSRF token of every request that is not read-only.
    """

    param_name = "sessionid"
    openapi_name = "session"

    def __init__(self, least: Role | None = None) -> None:
        super().__init__()
        self.least = least

    def authenticate(self, request: HttpRequest, key: str | None) -> Caller | None:
        user = request.user
        if not user.is_authenticated or not user.is_active:
            return None
        caller = Caller(user=user, fleet_role=user.fleet_role())
        if self.least is not None:
            caller.require(self.least)
        return caller


class KeyCaller(HttpBearer):
    """`Authorization: Bearer ph_…`, as on `/v1`. A request that brings a key is judged by it alone, whatever its cookies."""

    openapi_name = "api_key"

    def authenticate(self, request: HttpRequest, token: str) -> Caller:
        key = ApiKey.objects.select_related("tenant").filter(sha256=hash_secret(token)).first()
        if key is None or not key.usable or not key.tenant.active:
            raise AuthenticationError
        return Caller(key=key)


PEOPLE: list[Any] = [SessionCaller()]
VIEWERS: list[Any] = [SessionCaller(Role.VIEWER)]
PEOPLE_AND_KEYS: list[Any] = [KeyCaller(), SessionCaller()]
