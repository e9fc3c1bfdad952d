"""Details of an open row of the models page: service by class, and the five parts of its policy."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.console.formats import duration, milliseconds
from controlplane.console.pages.models.selectors import SLO_OVER, ModelRow
from controlplane.fleet.attainment import Attainment, together
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, SloClass
from controlplane.gateway.selectors import attainments
from controlplane.planning.parts import PARTS, PolicyChoice, PolicyPart

BUDGET_OVER = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ClassService:
    """Attainment of a class over the last hour and day, and its promise in words."""

    title: str
    promise: str
    hour: Attainment
    day: Attainment


def classes_of(model: str, now: datetime) -> list[ClassService]:
    """Return every SLO class, including those without judged requests."""
    hour, day = (
        together(row for by_class in attainments(now - over, model=model).values() for row in by_class.values())
        for over in (SLO_OVER, BUDGET_OVER)
    )
    rows = []
    for row in SloClass.objects.all():
        none = Attainment(row.name, 0, 0, row.percentile / 100)
        rows.append(ClassService(row.title, promise_of(row), hour.get(row.name, none), day.get(row.name, none)))
    return rows


def promise_of(slo_class: SloClass) -> str:
    """Return the promise of a class in words: "TTFT 1.00 s, ITL 200 ms"."""
    targets = (
        ("TTFT", slo_class.ttft_target_ms),
        ("ITL", slo_class.itl_target_ms),
        ("E2E", slo_class.e2e_target_ms),
    )
    words = [f"{name} {milliseconds(target)}" for name, target in targets if target is not None]
    if slo_class.deadline_s is not None:
        words.append(f"done in {duration(slo_class.deadline_s)}")
    return ", ".join(words) or "nothing promised"


def adapters_served(model: Model) -> str:
    """Say how many instances of *model* serve LoRA adapters, and what to do about the others."""
    rows = Instance.objects.launched().filter(deployment__model=model).select_related("deployment")
    instances = [row for row in rows if row.state != InstanceState.STOPPED]
    if not Deployment.objects.filter(model=model, active=True, max_loras__gt=0).exists():
        return "No deployment serves adapters: give one room for adapters on the GPU (max_loras), then roll it out."
    able = sum(row.adapter_slots[0] > 0 for row in instances)
    words = (
        f"{able} of {len(instances)} instance{'s' if len(instances) != 1 else ''} serve{'s' * (able == 1)} adapters."
    )
    late = [row for row in instances if row.deployment.max_loras and not row.adapter_slots[0]]
    if late:
        words += f" {len(late)} started before that was set: roll the deployment out on the page Instances."
    return words


def parts_of(row: ModelRow) -> list[tuple[PolicyPart, PolicyChoice]]:
    """Return the five parts of the policy of an open model, each with what is chosen."""
    return [(part, part.choice(row.present.values[part.name])) for part in PARTS]
