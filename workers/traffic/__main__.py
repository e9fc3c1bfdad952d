"""Send the demo's waves of requests from every region, until stopped; `manage.py up` runs this."""

import argparse
import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import django

if TYPE_CHECKING:
    from controlplane.accounts.models import Tenant
    from workers.traffic.waves import Waves

KEY_NAME, ACTOR = "demo traffic", "demo traffic"


def main(arguments: list[str] | None = None) -> str | None:
    """Return what is missing, if anything is."""
    parser = argparse.ArgumentParser(prog="python -m workers.traffic", description=__doc__)
    parser.add_argument("--url", required=True, help="the gateway, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn (default %(default)s)")
    options = parser.parse_args(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    django.setup()
    from controlplane.planning.demo_traffic import senders, streams_to
    from workers.traffic.waves import Waves

    sources = [stream for tenant in senders() for stream in streams_to(tenant, new_key(tenant))]
    if not sources:
        return "There is no tenant of the demo, or no active deployment to send requests to."
    asyncio.run(_until_stopped(Waves(options.url.rstrip("/"), sources, options.seed)))
    return None


def new_key(tenant: "Tenant") -> str:
    """Create a key for demo traffic. Its secret is not stored, so the last run's key is useless."""
    from controlplane.accounts.models import ApiKey
    from controlplane.accounts.services import create_api_key, revoke_api_key

    for key in ApiKey.objects.filter(tenant=tenant, name=KEY_NAME, revoked_at=None):
        revoke_api_key(key, ACTOR, "its secret ended with the last run")
    return create_api_key(tenant, KEY_NAME, ACTOR)[1]


async def _until_stopped(waves: "Waves") -> None:
    """Run *waves* until SIGINT or SIGTERM."""
    task = asyncio.create_task(waves.run())
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


if __name__ == "__main__":
    sys.exit(main())
