"""Details of an open row of the models page: service by class, and the five parts of its policy with their health."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Q, Sum

from controlplane.console.charts.cache import once
from controlplane.console.formats import age, count, duration, milliseconds, percent, percent_fine
from controlplane.console.pages.forecast.selectors import OutlookFilter, see
from controlplane.console.pages.models.selectors import SLO_OVER, ModelRow, hours_back
from controlplane.fleet.attainment import Attainment, together
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Model, SloClass
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import PrefixHits, attainments, prefix_hits
from controlplane.planning import selectors as planning
from controlplane.planning.models import PolicyMode, Quantity, ScalingPolicy
from controlplane.planning.parts import PARTS, PolicyChoice, PolicyPart
from controlplane.planning.titles import title_of

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


# The parts of a policy


@dataclass(frozen=True, slots=True)
class PartNow:
    """One part of a model's policy. *health* is a sentence, empty if nothing is known."""

    part: PolicyPart
    choice: PolicyChoice
    health: str = ""


def parts_of(row: ModelRow, now: datetime) -> list[PartNow]:
    """Return the parts of an open model."""
    hour, minute = _last_hour(row.name, now), now.replace(second=0, microsecond=0)
    hits = once(("prefix hits", row.name, minute), lambda: prefix_hits(minute - SLO_OVER, model=row.name))
    health = {
        "routing_policy": _router_health(row, hour, hits),
        "ordering_policy": _order_health(row, hour),
        "strategy": _plan_health(row.model, now),
        "FORECASTER": _forecast_health(row.name, now),
    }
    values = row.present.values
    return [PartNow(part, part.choice(values[part.name]), health.get(part.name, "")) for part in PARTS]


def _last_hour(model: str, now: datetime) -> dict[str, int]:
    """Count requests of the last hour: ended, served by another region than the caller's, and unserved."""
    rows = MinuteRow.objects.filter(model=model, generated=False, minute__gte=now - SLO_OVER)
    elsewhere = Sum("requests", filter=Q(own_region__gt=""), default=0)
    return rows.aggregate(ended=Sum("requests", default=0), elsewhere=elsewhere, unserved=Sum("unserved", default=0))


def _router_health(row: ModelRow, hour: dict[str, int], hits: PrefixHits) -> str:
    """Return the spread of use over instances, the share of requests that other regions took, and that of cached prompts."""
    uses = [use for endpoint in row.there for use in endpoint.uses]
    if not uses:
        return ""
    spread = f"Use {percent(min(uses))} to {percent(max(uses))}" if len(uses) > 1 else f"Use {percent(uses[0])}"
    if not hour["ended"]:
        return spread
    words = f"{spread}; {percent(hour['elsewhere'] / hour['ended'])} to other regions in 1 h"
    if hits.ratio is None:
        return words
    words += f"; {percent(hits.ratio)} of prompt tokens cached"
    if hits.expected_ratio is not None:
        words += f", {percent(hits.expected_ratio)} expected"
    if hits.wrong_by_events is not None:
        words += f" (from KV events, wrong by {percent(hits.wrong_by_events)})"
    if hits.wrong_by_estimate is not None:
        words += f" (estimated, wrong by {percent(hits.wrong_by_estimate)})"
    return words


def _order_health(row: ModelRow, hour: dict[str, int]) -> str:
    """Return the number of waiting requests, and of those that were not served in the last hour."""
    known = [endpoint.live for endpoint in row.there if endpoint.live]
    if not known:
        return ""
    waiting = sum(live["waiting"] or 0 for live in known)
    oldest_ms = 1000 * max((live["oldest_wait_s"] or 0.0 for live in known), default=0.0)
    held = row.live.get("held") or 0
    words = f"{count(waiting)} wait, the oldest for {milliseconds(oldest_ms)}" if waiting else "Nothing waits in queues"
    words += f", {count(held)} are held" if held else ""
    if not hour["ended"]:
        return words
    in_vain = f"{count(hour['unserved'])} of {count(hour['ended'])}" if hour["unserved"] else "none"
    return f"{words}; {in_vain} unserved in 1 h"


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
    seen = see(OutlookFilter(model, "", Quantity.OUTPUT, hours := hours_back()), now)
    if seen.forecast is None:
        return "No forecast yet"
    by, error = title_of(seen.forecast.forecaster), seen.accuracy.error
    return (
        f"{by}, mean error {percent_fine(error)} over {duration(3600 * hours)}"
        if error is not None
        else f"{by}, not judged yet"
    )
