"""`manage.py seed_demo`: the demo inventory of `controlplane/fleet/demo.py`, and the policies that scale it."""

from typing import Literal

from django.core.management.base import BaseCommand, CommandParser

from controlplane.fleet.demo import seed
from controlplane.planning import demo as planning


class Command(BaseCommand):
    help = "Create the demo inventory. Rows that exist are left as they are, so it can be run again at any time."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--fleet",
            choices=["none", "emulated"],
            default="emulated",
            help="with emulated instances (to be started by `manage.py up`), or with none (default: %(default)s)",
        )

    def handle(self, *, fleet: Literal["none", "emulated"], **options: object) -> None:
        created = seed(fleet) + planning.seed()
        if created:
            self.stdout.write("Created " + ", ".join(f"{count} {kind}" for kind, count in created.items()) + ".")
        else:
            self.stdout.write("The demo is in place already; nothing was changed.")
