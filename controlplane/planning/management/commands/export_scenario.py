from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.fleet.models import Deployment
from controlplane.planning.comparison.cluster import live_scenario
from controlplane.planning.execution import strategies
from controlplane.planning.models import ScalingPolicy
from controlplane.planning.plans import inventory
from controlplane.planning.plans.round import plan_settings
from controlplane.simulation.management.commands.export_ledger import moment
from controlplane.simulation.selectors import LEDGER_COLUMNS, asked_rows, ledger_trace
from controlplane.tuning.rules import beneath
from controlplane.tuning.selectors import tuned
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
        rows = asked_rows(options["since"], options["until"])
        tables = live_scenario(fleet, rows)
        if not tables["fleet"]:
            raise CommandError(
                "No active deployment has a performance profile: nothing says how long its instances take."
            )
        rows = rows.filter(model__in=list(tables["models"]))
        count = rows.count()
        if not count:
            raise CommandError("The ledger holds no request to a model of the fleet in this time.")
        values = {"title": "The live fleet", "sample_s": 60.0, **tables, **scaling(fleet, tables)}
        values |= {"demand": {"too_long": "clip"}, "trace": {"file": REQUESTS, "format": "ledger"}}
        file = folder / "scenario.toml"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_scenario(without_none(values), file)
            write_csv(folder / REQUESTS, LEDGER_COLUMNS, ledger_trace(rows))
            file.write_text(to_toml(values), encoding="utf-8")
        except ScenarioError as error:
            raise CommandError(f"The fleet is no scenario: {error.key}: {error.what}") from error
        except OSError as error:
            raise CommandError(f"{folder}: {error.strerror}") from error
        self.stdout.write(f"{count} requests and {len(tables['fleet'])} deployments written to {folder}")


def scaling(fleet: inventory.Fleet, tables: dict[str, Any]) -> dict[str, Any]:
    """Strategies, bounds, floor and planner as they are live. A model without a policy has `reactive`."""
    policies = {row.model.name: row for row in ScalingPolicy.objects.select_related("model")}
    endpoints = []
    for endpoint in tables["endpoints"]:
        key = endpoint["model"], endpoint["region"]
        own = [row for place, row in fleet.deployments.items() if place[:2] == key]
        bounds = {name: sum(getattr(row, name) for row in own) for name in ("min_instances", "max_instances")}
        policy = policies.get(endpoint["model"])
        followed = strategy_of(policy) if policy else {}
        endpoints.append({**endpoint, **followed, **bounds})
    plans, floor = plan_settings(), beneath(tuned())
    return {
        "endpoints": endpoints,
        "scaling": {
            "strategy": "reactive",
            "parameters": strategies.marks("reactive", tuned()),
            "min_instances": 0,
            "max_instances": 1,
            "floor": tuned().FLOOR,
            "floor_above": floor.above,
            "floor_cooldown_s": floor.cooldown_s,
        },
        "planner": {
            **({} if plans.period_s is None else {"period_s": float(plans.period_s)}),
            "epsilon": plans.epsilon,
            "time_limit_s": float(plans.time_limit_s),
            "capability_instances": tuned().CAPABILITY_INSTANCES,
            "capability_most_above": tuned().CAPABILITY_MOST_ABOVE,
        },
    }


def strategy_of(policy: ScalingPolicy) -> dict[str, Any]:
    """The strategy of *policy*, with its parameters and the marks of its model's settings."""
    marks = strategies.marks(policy.strategy, tuned(policy.model.name))
    return {"strategy": policy.strategy, "parameters": {**marks, **policy.parameters}}


def without_none(value: Any) -> Any:
    """*value* as it is read back from TOML, which has no None."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value
