"""`manage.py create_key TENANT`: an API key without the console; with `--role`, a service key for `/api`."""

from datetime import timedelta

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from controlplane.accounts.models import Role, Tenant
from controlplane.accounts.services import create_api_key


class Command(BaseCommand):
    help = "Create an API key of a tenant and print it. It is not stored and not shown again."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant")
        parser.add_argument("--name", default="command line", help="what it is for (default: %(default)s)")
        parser.add_argument(
            "--role", choices=Role.values, help="make a service key: what it may do over the fleet on /api"
        )
        parser.add_argument("--days", type=int, help="how long it works (default: for ever; of a service key 90)")

    def handle(self, *, tenant: str, name: str, role: str | None, days: int | None, **options: object) -> None:
        row = Tenant.objects.filter(name=tenant).first()
        if row is None:
            names = ", ".join(Tenant.objects.values_list("name", flat=True)[:10])
            raise CommandError(f"There is no tenant {tenant!r}. Tenants: {names or 'none'}.")
        days = 90 if days is None and role else days
        expires_at = None if days is None else timezone.now() + timedelta(days=days)
        try:
            _, secret = create_api_key(
                row, name, "manage.py create_key", expires_at=expires_at, role=Role(role) if role else None
            )
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        self.stdout.write(secret)
