"""Makes `FleetAdminSite` the default admin site; it stands in INSTALLED_APPS where `django.contrib.admin` would."""

from django.contrib.admin.apps import AdminConfig


class FleetAdminConfig(AdminConfig):
    default_site = "controlplane.accounts.admin_site.FleetAdminSite"
