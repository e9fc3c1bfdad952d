"""`manage.py create_key TENANT`: an API key without the console."""

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key


class Command(BaseCommand):
    help = "Create an API key of a tenant and print it. It is not stored and not shown again."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("tenant")
        parser.add_argument("--name", default="command line", help="what it is for (default: %(default)s)")

    def handle(self, *, tenant: str, name: str, **options: object) -> None:
        row = Tenant.objects.filter(name=tenant).first()
        if row is None:
            names = ", ".join(Tenant.objects.values_list("name", flat=True)[:10])
            raise CommandError(f"There is no tenant {tenant!r}. Tenants: {names or 'none'}.")
        try:
            _, secret = create_api_key(row, name, "manage.py create_key")
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        self.stdout.write(secret)
