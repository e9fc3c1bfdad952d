"""Admin of users, tenants, memberships and budgets. Keys are made and revoked on their page."""

from django.contrib import admin
from django.contrib.auth.models import Group

from controlplane.accounts.models import Role
from controlplane.resources.admin import register
from controlplane.resources.budgets import BUDGETS
from controlplane.resources.keys import TENANTS
from controlplane.resources.users import MEMBERSHIPS, USERS

admin.site.unregister(Group)  # rights come from memberships
register(TENANTS)
register(USERS, "username", "email", "is_active", "last_login", view_role=Role.ADMIN)
register(MEMBERSHIPS, "user", "tenant", "role")
register(BUDGETS, "__str__", "kind", "soft", "hard", "spent_usd", "stopped_at")
