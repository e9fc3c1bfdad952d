"""Export of the live fleet and its ledger as a folder with a scenario that `simulate` runs."""

from datetime import datetime
from pathlib import Path
from typing import Final

from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import LEDGER_COLUMNS, ledger_rows, ledger_trace
from scheduling.simulation.measures.tables import write_csv
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.scenario.toml_text import to_toml

REQUESTS: Final = "requests.csv"


def export(folder: Path, since: datetime | None = None, until: datetime | None = None) -> str:
    """Write `scenario.toml` and `requests.csv`, the requests from *since* to *until*; return what was written in words.

    Raises ValueError without a profile or requests, ScenarioError for a fleet that is no scenario, OSError.
    """
    rows = ledger_rows(since, until)
    values = scenario_of(inventory.read(), rows, since)
    if not values["fleet"]:
        raise ValueError("No active deployment has a performance profile, which gives instances' times.")
    rows = rows.filter(model__in=list(values["models"]))
    count = rows.count()
    if not count:
        raise ValueError("The ledger has no request to a model of the fleet in this time.")
    values |= {"demand": {"too_long": "clip"}, "trace": {"file": REQUESTS, "format": "ledger"}}
    file = folder / "scenario.toml"
    folder.mkdir(parents=True, exist_ok=True)
    check_scenario(values, file)
    write_csv(folder / REQUESTS, LEDGER_COLUMNS, ledger_trace(rows))
    file.write_text(to_toml(values), encoding="utf-8")
    return f"{count} requests and {len(values['fleet'])} deployments written to {folder}"
