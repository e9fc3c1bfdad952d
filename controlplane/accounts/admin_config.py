"""App that makes `FleetAdminSite` the default admin site, in place of `django.contrib.admin`.

Admin modules stand on everything, so they are read with the URLs that show them (`controlplane/urls.py`), not by commands.
"""

from typing import Any

from django.contrib.admin import autodiscover
from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.admin.checks import check_admin_app, check_dependencies
from django.core import checks


class FleetAdminConfig(SimpleAdminConfig):
    default_site = "controlplane.accounts.admin_site.FleetAdminSite"

    def ready(self) -> None:
        checks.register(check_dependencies, checks.Tags.admin)
        checks.register(check_discovered, checks.Tags.admin)


def check_discovered(app_configs: Any, **options: Any) -> list[checks.CheckMessage]:
    """Run Django's checks of all admin classes, after importing them."""
    autodiscover()
    return check_admin_app(app_configs, **options)
