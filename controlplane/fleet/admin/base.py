"""Base of the admin pages of the inventory."""

from django.db import transaction
from django.http import HttpRequest

from controlplane.accounts.admin_site import Row
from controlplane.events.admin import AuditedAdmin
from controlplane.fleet import services

Deleted = tuple[list[str], dict[str, int], set[str], list[str]]
"""Result of `get_deleted_objects`: rows, counts by kind, kinds that may not be deleted, rows in the way."""


class InventoryAdmin(AuditedAdmin[Row]):
    """Base of inventory pages: every change notifies the gateways."""

    def after_write(self, request: HttpRequest, row: Row, *, created: bool) -> None:
        transaction.on_commit(services.notify)
