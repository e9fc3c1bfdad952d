"""`manage.py keys`: API keys without the console: which there are; `--revoke` ends one."""

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.models import ApiKey
from controlplane.accounts.services import revoke_api_key


class Command(BaseCommand):
    help = "List the API keys in use, or revoke one."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--tenant", default="", help="only keys of this tenant")
        parser.add_argument("--revoke", metavar="PREFIX", help="end the key that begins so")
        parser.add_argument("--reason", default="", help="why it is revoked")

    def handle(self, *, tenant: str, revoke: str | None, reason: str, **options: object) -> None:
        keys = ApiKey.objects.filter(revoked_at=None).select_related("tenant", "account")
        if tenant:
            keys = keys.filter(tenant__name=tenant)
        if revoke is None:
            for key in keys:
                until = f"until {key.expires_at:%Y-%m-%d}" if key.expires_at else "without end"
                may = f"{key.role} over the fleet" if key.role else "inference"
                expired = "" if key.usable else ", expired"
                self.stdout.write(f"{key.prefix}  {key.tenant.name}  {key.name}  {may}, {until}{expired}")
            return
        chosen = list(keys.filter(prefix__startswith=revoke[:11]))
        if not reason or len(chosen) != 1 or len(revoke) < 7:
            what = "Give --reason." if not reason else f"{len(chosen)} keys in use begin with {revoke!r}."
            raise CommandError(what)
        revoke_api_key(chosen[0], "manage.py keys", reason)
        self.stdout.write(f"{chosen[0]} is revoked.")
