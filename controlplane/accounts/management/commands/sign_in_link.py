"""`manage.py sign_in_link USER`: a one-time link for a user without a password, or who has forgotten it."""

from datetime import timedelta

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.models import User
from controlplane.accounts.services import SIGN_IN_LINK_LIFETIME, create_sign_in_link


class Command(BaseCommand):
    help = "Print a link that signs a user in to the console once."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        minutes = int(SIGN_IN_LINK_LIFETIME.total_seconds() // 60)
        parser.add_argument("username")
        parser.add_argument("--minutes", type=int, default=minutes, help="how long it works (default: %(default)s)")
        parser.add_argument("--url", default=settings.CONSOLE_URL, help="of the console (default: %(default)s)")

    def handle(self, *, username: str, minutes: int, url: str, **options: object) -> None:
        user = User.objects.filter(username=username, is_active=True).first()
        if user is None:
            names = ", ".join(User.objects.filter(is_active=True).values_list("username", flat=True)[:10])
            raise CommandError(f"There is no active user {username!r}. Users: {names or 'none'}.")
        if minutes < 1:
            raise CommandError("A link works for at least one minute.")
        token = create_sign_in_link(user, lifetime=timedelta(minutes=minutes), actor="manage.py sign_in_link")
        self.stdout.write(f"{url.rstrip('/')}/sign-in/{token}/")
