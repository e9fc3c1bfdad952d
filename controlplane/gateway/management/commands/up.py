import asyncio
import os
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane import env
from controlplane.supervisor.screen import Screen
from controlplane.supervisor.stack import Plan, run


class Command(BaseCommand):
    help = (
        "Run the whole stack on this machine: Redis, web, Celery, an emulated fleet and demo traffic. Ctrl-C ends it."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="address of the web process (default %(default)s)")
        parser.add_argument("--port", type=int, default=8000, help="port of the web process (default %(default)s)")
        parser.add_argument(
            "--relays",
            type=int,
            default=0,
            help="processes that share the port, beside dispatchers; each uses a port after it (default: one does all)",
        )
        parser.add_argument(
            "--dispatchers", type=int, default=2, help="with relays: one decides, others stand by (default %(default)s)"
        )
        parser.add_argument(
            "--zones", nargs="+", default=[], help="zones in which these stand in turn (default: as here)"
        )
        parser.add_argument("--no-demo", action="store_true", help="no demo rows, no emulated fleet, no traffic")
        parser.add_argument("--no-traffic", action="store_true", help="the emulated fleet, but no demo traffic")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["relays"] < 0 or options["dispatchers"] < 1:
            raise CommandError("--relays is 0 or more, --dispatchers 1 or more.")
        plan = Plan(
            state_dir=settings.STATE_DIR,
            host=options["host"],
            port=options["port"],
            relays=options["relays"],
            dispatchers=options["dispatchers"],
            zones=tuple(options["zones"]),
            drain_s=settings.DRAIN_S,
            emulator_port=settings.EMULATOR_PORT,
            redis_url=settings.REDIS_URL if env.read().REDIS_URL.get_secret_value() else "",
            demo=not options["no_demo"],
            traffic=not options["no_demo"] and not options["no_traffic"],
            what_if_processes=settings.WHAT_IF_PROCESSES,
        )
        os.chdir(settings.BASE_DIR)
        sys.exit(asyncio.run(run(plan, Screen())))
