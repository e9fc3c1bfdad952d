"""Admin of tenants. Users, keys and budgets have their pages."""

from django.contrib import admin
from django.contrib.auth.models import Group

from controlplane.fleet.inventory.kinds import TENANT
from controlplane.resources.admin import register

admin.site.unregister(Group)  # rights come from memberships
register(TENANT)
