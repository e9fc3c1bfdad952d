"""Replay of an application: its recorded runs begin again as they did, with the other requests of that time.

The runs are those of the ledger's window that were learned from; each step comes once the one before it has ended. Other
requests come when they came. So a what-if of orders varies the order alone.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import Any, Final

import msgspec

from controlplane.accounts.models import User
from controlplane.applications.models import Application, ApplicationRun
from controlplane.applications.selectors import graph_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.titles import title_of
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.changes.policies import PARTS
from controlplane.simulation.whatif.models import WhatIf
from controlplane.simulation.whatif.services import ask
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.applications.demand_graph import DemandGraph

MAX_RUNS: Final = 400
"""Runs that are replayed, the last ones."""
KNOWN: Final = 200
"""Records that orders know of the application."""
AROUND: Final = timedelta(minutes=5)
"""After the last call, within which its row of the ledger began."""
SEEDS: Final = 3
ORDERS: Final = ("fcfs", "application", "srpt", "hermes", "run_deadline", "run_slack")


def replay_orders(
    application: Application, orders: Sequence[str], since: datetime, until: datetime, actor: User
) -> WhatIf:
    """Submit a what-if of *orders* that replays the runs of *application* from *since* until *until*.

    Raises ActionError where that is impossible, ValidationError as `services.ask`.
    """
    for order in orders:
        if order not in PARTS["ordering"]:
            raise ActionError(f"There is no order {order!r}; there are {', '.join(PARTS['ordering'])}.")
    if not orders:
        raise ActionError("Choose an order to compare with.")
    horizon_s = (until - since).total_seconds()
    rows = application.runs.filter(imported=False, began_at__gte=since, began_at__lt=until).exclude(steps=[])
    runs = sorted(rows[:MAX_RUNS], key=lambda one: one.began_at)
    if not runs:
        raise ActionError(f"No run of {application} that ended well began in that time.")
    start = start_of(Begin(kind="ledger", since=since, until=until), horizon_s)
    start.arrivals["without"] = [application.tenant_id, application.name]
    table = _table(application, runs, start, since)
    futures = [
        {
            "name": title_of(order),
            "changes": [{"kind": "policy", "part": "ordering", "value": order, "models": [table["model"]]}],
        }
        for order in dict.fromkeys(orders)
    ]
    values = {
        "title": f"{application}: {len(runs)} runs with another order",
        "start": start.model_dump(mode="json"),
        "horizon_s": horizon_s,
        "seeds": SEEDS,
        "edits": [{"kind": "application", "application": table}],
    }
    return ask(values, futures, actor)


def _table(application: Application, runs: Sequence[ApplicationRun], start: Start, since: datetime) -> dict[str, Any]:
    """Return the table `[[applications]]` of *runs*. Raises ActionError if the fleet does not serve their model."""
    known = graph_of(application)
    llm = {name: unit.name for name, unit in known.units.items() if unit.kind == "llm"}
    steps = Counter(llm[step["unit"]] for one in runs for step in one.steps if step["unit"] in llm)
    models = [name for name, _ in steps.most_common() if name in start.scenario["models"]]
    if not models:
        raise ActionError(f"No model of {application} is served with a performance profile.")
    until = max(one.last_call_at for one in runs)
    calls = ledger_rows(since, until + AROUND).filter(tenant=application.tenant_id, application=application.name)
    own = calls.annotate(own=OWN_REGION).values_list("own", "slo_class")
    regions, classes = (Counter(names) for names in zip(*own, strict=True)) if own else (Counter(), Counter())
    deadlines = [one.deadline_s for one in runs if one.deadline_s]
    served = {name: count for name, count in regions.items() if name in start.scenario["regions"]}
    slo_classes = [name for name, _ in classes.most_common() if name in start.scenario["classes"]]
    table: dict[str, Any] = {
        "name": application.name,
        "graph": _graph(known, [one.steps for one in runs]),
        "known": _graph(known, [msgspec.to_builtins(one.steps) for one in known.records[-KNOWN:]]),
        "model": models[0],
        "models": {
            unit: model for unit, model in llm.items() if model != models[0] and model in start.scenario["models"]
        },
        "slo_class": slo_classes[0] if slo_classes else next(iter(start.scenario["classes"])),
        "tenant": application.tenant.name,
        "begins_s": [max(0.0, (one.began_at - since).total_seconds()) for one in runs],
    }
    if served:
        table["regions"] = served
    if deadlines:
        table["deadline_s"] = median(deadlines)
    return table


def _graph(known: DemandGraph, records: Sequence[Any]) -> dict[str, Any]:
    """Return the JSON form of a graph with the units of *known*, and *records* as lists of steps."""
    made: dict[str, Any] = msgspec.json.decode(DemandGraph(known.application, known.units).to_json())
    return made | {"records": [{"steps": list(steps)} for steps in records]}
