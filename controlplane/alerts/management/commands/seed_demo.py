"""`manage.py seed_demo`: the demo inventory of `controlplane/fleet/demo.toml`, its scaling policies, alert rules
and history."""

from typing import Literal

from django.core.management.base import BaseCommand, CommandParser
from django.utils import timezone

from controlplane.alerts import demo as alerts
from controlplane.fleet.demo import seed
from controlplane.planning import demo as planning
from controlplane.planning.demo_traffic import PAST_HOURS, generate_past
from controlplane.planning.demo_traffic import remove_past as remove_generated
from controlplane.planning.forecasts.services import forget_fitted


class Command(BaseCommand):
    help = "Create the demo inventory. Rows that exist are left as they are, so it can be run again at any time."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--fleet",
            choices=["none", "emulated"],
            default="emulated",
            help="with emulated instances (to be started by `manage.py up`), or with none (default: %(default)s)",
        )
        parser.add_argument(
            "--past-hours",
            type=float,
            default=PAST_HOURS,
            metavar="H",
            help="how much past demand to generate for an emulated fleet that has counted none yet (default: %(default)g)",
        )
        parser.add_argument("--remove-past", action="store_true", help="only take the generated past away again")

    def handle(
        self,
        *,
        fleet: Literal["none", "emulated"] = "emulated",
        past_hours: float = PAST_HOURS,
        remove_past: bool = False,
        **options: object,
    ) -> None:
        if remove_past:
            self.stdout.write(_without_past())
            return
        created = seed(fleet) + planning.seed() + alerts.seed()
        if fleet == "emulated" and (rows := generate_past(timezone.now(), past_hours)):
            created["minutes of generated demand"] = rows
        if created:
            self.stdout.write("Created " + ", ".join(f"{count} {kind}" for kind, count in created.items()) + ".")
        else:
            self.stdout.write("The demo is in place already; nothing was changed.")


def _without_past() -> str:
    """Delete the generated history and the forecasters fitted to it."""
    rows = remove_generated()
    if not rows:
        return "There is no generated past."
    forget_fitted()
    return f"Removed {rows} minutes of generated demand. Forecasters are fitted again, to what was counted."
