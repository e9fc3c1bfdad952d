"""A capacity plan as a what-if: the present fleet and the planned one, under the demand that is planned for."""

from typing import Final

from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.planning.models import CapacityPlan
from controlplane.planning.sizing import demand as demands
from controlplane.planning.sizing.question import Question
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.models import WhatIf
from controlplane.simulation.whatif.start import Start

HORIZON_S: Final = 1800.0
SEEDS: Final = 3


def ask_what_if(row: CapacityPlan, actor: User) -> WhatIf:
    """Ask for the what-if of *row*. Raise as `services.ask`, and ActionError without requests."""
    question, now = Question.model_validate(row.question), timezone.now()
    try:
        demand = demands.read(question, now)
    except ValueError as error:
        raise ActionError(str(error)) from error
    start = Start(
        kind="fleet",
        at=now,
        scenario=selectors.present_scenario() | {"demand": {"too_long": "clip"}},
        arrivals=demand.arrivals | {"horizon_s": HORIZON_S},
        remarks=[f"{demand.factor:.2f} times the demand of today's busiest ten minutes, from an idle fleet."],
    )
    future = {"name": str(row), "changes": [{"kind": "fleet", "title": str(row), **row.answer["scenario"]}]}
    values = {
        "title": f"{row}, at {demand.factor:.2f} times today's demand",
        "start": start.model_dump(mode="json"),
        "horizon_s": HORIZON_S,
        "seeds": SEEDS,
    }
    return services.ask(values, [future], actor)
