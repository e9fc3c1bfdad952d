"""Replay of an application: its runs and the other requests of a window of the ledger, with another order."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from controlplane.accounts.models import User
from controlplane.applications.models import Application
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.planning.titles import title_of
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif.changes.policies import PARTS
from controlplane.simulation.whatif.models import WhatIf
from controlplane.simulation.whatif.services import ask
from controlplane.simulation.whatif.starts.begin import Begin, start_of

SEEDS: Final = 1
"""The requests are those of the ledger in each."""
ORDERS: Final = ("fcfs", "application", "srpt", "hermes", "run_deadline", "run_slack")


def replay_orders(
    application: Application, orders: Sequence[str], since: datetime, until: datetime, actor: User
) -> WhatIf:
    """Submit a what-if of *orders* for the models of *application*, with the requests from *since* until *until*.

    Raises ActionError where that is impossible, ValidationError as `services.ask`.
    """
    for order in orders:
        if order not in PARTS["ordering"]:
            raise ActionError(f"There is no order {order!r}; there are {', '.join(PARTS['ordering'])}.")
    if not orders:
        raise ActionError("Choose an order to compare with.")
    calls = ledger_rows(since, until).filter(tenant=application.tenant_id, application=application.name)
    asked = sorted(set(calls.exclude(run="").order_by().values_list("model", flat=True)))
    if not asked:
        raise ActionError(f"No run of {application} had a call in that time.")
    horizon_s = (until - since).total_seconds()
    start = start_of(Begin(kind="ledger", since=since, until=until), horizon_s)
    models = [name for name in asked if name in start.scenario["models"]]
    if not models:
        raise ActionError(f"No model of {application} is served with a performance profile.")
    futures = [
        {
            "name": title_of(order),
            "changes": [{"kind": "policy", "part": "ordering", "value": order, "models": models}],
        }
        for order in dict.fromkeys(orders)
    ]
    values = {
        "title": f"{application}: runs with another order",
        "start": start.model_dump(mode="json"),
        "horizon_s": horizon_s,
        "seeds": SEEDS,
    }
    return ask(values, futures, actor)
