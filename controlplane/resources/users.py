"""People who sign in to the console, and their roles in tenants."""

from django.db.models import QuerySet

from controlplane.accounts.models import Membership, Role, User
from controlplane.fleet.inventory.kinds import MEMBERSHIP, USER
from controlplane.resources.filters import Search
from controlplane.resources.resource import Column, Filter, Resource, Viewer, search_in


def people(_viewer: Viewer) -> QuerySet[User]:
    """Return all users but the accounts of service keys."""
    return User.objects.filter(service_role="").prefetch_related("memberships__tenant").order_by("username")


def access(user: User) -> list[str]:
    """Return the roles of *user*, such as `operator of acme`."""
    given = sorted(f"{one.role} of {one.tenant.name}" for one in user.memberships.all())
    return ["superuser", *given] if user.is_superuser else given


USERS = Resource(
    name="users",
    noun="user",
    title="Users and access",
    model=User,
    kind=USER,
    rows=people,
    least=Role.ADMIN,
    columns=(
        Column("id"),
        Column("username", "User name", draw="console/users/name_cell.html"),
        Column("email", "Mail"),
        Column("access", "Access", access, type=list[str], draw="console/users/access_cell.html", kind="wide"),
        Column("is_active", "Active"),
        Column("has_password", source=lambda user: user.has_usable_password(), type=bool),
        Column("date_joined", "Added (UTC)", draw="moment"),
        Column("last_login", "Last sign-in (UTC)", draw="moment"),
    ),
    filters=(search_in("username", "email", control=Search("q", "Search by name or mail")),),
    page=("username", "email", "access", "date_joined", "last_login"),
    caption="by name",
    actions="console/users/actions.html",
    whole=1000,
)
MEMBERSHIPS = Resource(
    name="memberships",
    noun="membership",
    model=Membership,
    kind=MEMBERSHIP,
    rows=lambda viewer: Membership.objects.select_related("user", "tenant"),
    least=Role.ADMIN,
    columns=(
        Column("id"),
        Column("user", source="user.username", type=str),
        Column("tenant", source="tenant.name", type=str),
        Column("role", type=Role),
    ),
    filters=(Filter("user", "user__username"), Filter("tenant", "tenant__name")),
)
