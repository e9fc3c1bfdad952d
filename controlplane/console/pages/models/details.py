"""What an open row of the models page shows: service by class, and the five parts of its policy with how each does."""

from dataclasses import dataclass
from datetime import datetime

from controlplane.console.formats import age, duration, milliseconds, percent_fine
from controlplane.console.pages.forecast.selectors import Asked, see
from controlplane.console.pages.models.selectors import HOURS, ModelRow, Ratio, share_of, slo_by_class
from controlplane.fleet.models import Model, SloClass
from controlplane.lengths.selectors import active_version
from controlplane.planning import selectors as planning
from controlplane.planning.models import PolicyMode, Quantity, ScalingPolicy
from controlplane.planning.parts import PARTS, Choice, Part
from controlplane.planning.titles import title_of


@dataclass(frozen=True, slots=True)
class ClassService:
    """How a class was served over the last hour, and what it was promised in words."""

    title: str
    promise: str
    met: Ratio
    judged: int
    target: float  # the share that its percentile promises

    @property
    def below(self) -> bool:
        return self.met is not None and self.met < self.target


def classes_of(model: str, now: datetime) -> list[ClassService]:
    """Every SLO class, those of which nothing was judged too."""
    served = [by_class for (name, _), by_class in slo_by_class(now).items() if name == model]
    rows = []
    for row in SloClass.objects.all():
        pairs = [by_class[row.name] for by_class in served if row.name in by_class]
        judged = sum(judged for _, judged in pairs)
        rows.append(ClassService(row.title, promise_of(row), share_of(pairs), judged, row.percentile / 100))
    return rows


def promise_of(slo_class: SloClass) -> str:
    """What a class promises, in words: "TTFT 1.00 s, ITL 200 ms"."""
    targets = (
        ("TTFT", slo_class.ttft_target_ms),
        ("ITL", slo_class.itl_target_ms),
        ("E2E", slo_class.e2e_target_ms),
    )
    words = [f"{name} {milliseconds(target)}" for name, target in targets if target is not None]
    if slo_class.deadline_s is not None:
        words.append(f"done in {duration(slo_class.deadline_s)}")
    return ", ".join(words) or "nothing promised"


# The parts of a policy


@dataclass(frozen=True, slots=True)
class PartNow:
    """One part as a model has it. *health* says how it does, where anything is known."""

    part: Part
    choice: Choice
    health: str = ""


def parts_of(row: ModelRow, now: datetime) -> list[PartNow]:
    """The five parts of an open model."""
    health = {
        "strategy": _plan_health(row.model, now),
        "FORECASTER": _forecast_health(row.name, now),
        "length_model": _length_health(row.model),
    }
    values = row.present.values
    return [PartNow(part, part.choice(values[part.name]), health.get(part.name, "")) for part in PARTS]


def _plan_health(model: Model, now: datetime) -> str:
    policy = ScalingPolicy.objects.filter(model=model).first()
    if policy is None:
        return "No policy was set"
    mode = PolicyMode(policy.mode).label.partition(":")[0]
    plan = planning.plans(model=model.name).first()
    return f"Mode {mode.lower()}; " + (
        f"last plan {age((now - plan.made_at).total_seconds())}" if plan else "no plan yet"
    )


def _forecast_health(model: str, now: datetime) -> str:
    seen = see(Asked(model, "", Quantity.OUTPUT, HOURS), now)
    if seen.forecast is None:
        return "No forecast yet"
    by, error = title_of(seen.forecast.forecaster), seen.accuracy.mean_ape
    return f"{by}, mean error {percent_fine(error)} over {HOURS} h" if error is not None else f"{by}, not judged yet"


def _length_health(model: Model) -> str:
    if model.length_model:
        return ""
    version = active_version()
    return f"{version} is active" if version else "The bundled student"
