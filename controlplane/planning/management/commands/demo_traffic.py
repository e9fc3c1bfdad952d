import asyncio
import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.planning.demo_traffic import SHARES, senders, streams_to
from workers.traffic.waves import Waves

KEY_NAME = "demo traffic"
ACTOR = "manage.py demo_traffic"


class Command(BaseCommand):
    help = "Send made-up waves of requests from every region, until stopped; `manage.py up` runs this."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--url", default=f"{settings.CONSOLE_URL}/v1", help="the gateway (default %(default)s)")
        parser.add_argument("--tenant", help=f"who sends (default: {' and '.join(SHARES)}, each a share)")
        parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default %(default)s)")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["tenant"]
        tenants = list(Tenant.objects.filter(name=name, active=True)) if name else senders()
        if not tenants:
            wanted = f"tenant {name!r}" if name else f"tenant of {', '.join(SHARES)}"
            raise CommandError(f"There is no active {wanted}; `manage.py seed_demo` makes the demo's.")
        sources = [stream for tenant in tenants for stream in streams_to(tenant, new_key(tenant))]
        if not sources:
            raise CommandError("There is no active deployment to send requests to.")
        asyncio.run(until_stopped(Waves(options["url"].rstrip("/"), sources, options["seed"])))


def new_key(tenant: Tenant) -> str:
    """Create a key for demo traffic. Its secret is not stored, so the last run's key is useless."""
    for key in ApiKey.objects.filter(tenant=tenant, name=KEY_NAME, revoked_at=None):
        revoke_api_key(key, ACTOR, "its secret ended with the last run")
    return create_api_key(tenant, KEY_NAME, ACTOR)[1]


async def until_stopped(waves: Waves) -> None:
    """Run *waves* until SIGINT or SIGTERM."""
    task = asyncio.create_task(waves.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
