from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.fleet.models import Deployment
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.management.commands.export_ledger import moment
from controlplane.simulation.selectors import LEDGER_COLUMNS, ledger_rows, ledger_trace
from scheduling.simulation.measures.tables import write_csv
from scheduling.simulation.scenario import ScenarioError
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.scenario.toml_text import to_toml

REQUESTS = "requests.csv"


class Command(BaseCommand):
    help = "Write the live fleet and the request ledger as a scenario: a folder with scenario.toml and requests.csv."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("folder", type=Path, help="made if it is not there")
        parser.add_argument("--since", type=moment, help="requests from this moment on, such as 2026-11-20T08:00")
        parser.add_argument("--until", type=moment, help="requests before this moment")

    def handle(self, *args: Any, **options: Any) -> None:
        folder = options["folder"]
        models = set(Deployment.objects.filter(active=True).values_list("model__name", flat=True))
        fleet = inventory.read(models)
        rows = ledger_rows(options["since"], options["until"])
        values = scenario_of(fleet, rows)
        if not values["fleet"]:
            raise CommandError(
                "No active deployment has a performance profile: nothing says how long its instances take."
            )
        rows = rows.filter(model__in=list(values["models"]))
        count = rows.count()
        if not count:
            raise CommandError("The ledger holds no request to a model of the fleet in this time.")
        values |= {"demand": {"too_long": "clip"}, "trace": {"file": REQUESTS, "format": "ledger"}}
        file = folder / "scenario.toml"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_scenario(values, file)
            write_csv(folder / REQUESTS, LEDGER_COLUMNS, ledger_trace(rows))
            file.write_text(to_toml(values), encoding="utf-8")
        except ScenarioError as error:
            raise CommandError(f"The fleet is no scenario: {error.key}: {error.what}") from error
        except OSError as error:
            raise CommandError(f"{folder}: {error.strerror}") from error
        self.stdout.write(f"{count} requests and {len(values['fleet'])} deployments written to {folder}")
