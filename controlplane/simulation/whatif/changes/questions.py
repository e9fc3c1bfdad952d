"""Questions that a planner asks of every fleet, as changes of the fleet that is there."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from controlplane.simulation.whatif.changes.base import ChangeError, Values
from controlplane.simulation.whatif.starts.nodes import nodes_of

QUESTIONS: Final[Mapping[str, str]] = {
    "region": "What if a region is lost?",
    "double": "What if demand doubles?",
    "node": "What if a node is lost?",
    "model": "What if a model grows by half?",
}
LOST: Final = {"kind": "failure", "at_s": 60, "for_s": 300}
MORE: Final = {"kind": "demand", "edit": "factor"}


def change_of(question: str, values: Values) -> dict[str, Any]:
    """Return the change that one of QUESTIONS asks about: of the busiest model, region or node of the scenario *values*.

    Raise ChangeError where the fleet has none.
    """
    busy = {"model": Counter[str](), "region": Counter[str](), "node": Counter[str]()}
    for group in values["fleet"]:
        for region in group["regions"]:
            busy["model"][group["model"]] += group["instances"]
            busy["region"][region] += group["instances"]
    if question == "node":
        busy["node"].update({name: len(node.instances) for name, node in nodes_of(values).items()})
    busiest = next((name for name, _ in busy.get(question, Counter()).most_common(1)), None)
    match question:
        case "double":
            return MORE | {"by": 2}
        case "model" if busiest:
            return MORE | {"by": 1.5, "models": [busiest]}
        case "region" | "node" if busiest:
            return LOST | {"what": question, question: busiest}
    raise ChangeError("", f"No {question} of the fleet has an instance that is ready.")
