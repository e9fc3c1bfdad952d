"""Work of the Celery task that answers a capacity plan: the least fleet at once, then checked by simulation."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from django.utils import timezone
from numpy.typing import NDArray

from controlplane.planning.models import CapacityPlan, CapacityState
from controlplane.planning.plans import inventory
from controlplane.planning.plans.services import plan_settings
from controlplane.planning.sizing import demand as demands
from controlplane.planning.sizing.offers import Offer, offers
from controlplane.planning.sizing.question import Question
from controlplane.planning.sizing.selectors import Types, classes_of, gpu_types
from controlplane.planning.sizing.simulated import SimulatedFleet, present_scenario
from scheduling.planning.advisor import Demand, EndpointDemand, with_reserve
from scheduling.planning.programme import SolverLost
from scheduling.planning.sizing import HOURS_A_MONTH, Settled, Sought, carried, least, settle

CHECK_S: Final = 26.0
"""Time for the search by simulation, which begins with the least fleet for the promises themselves."""
ANYWHERE: Final = 1e-6
"""Share of a region's demand that it must serve itself, where the question is what all GPUs together carry."""
MONTH: Final = timedelta(hours=HOURS_A_MONTH)
Counts = NDArray[np.int64]


def work(pk: int) -> None:
    """Answer the capacity plan *pk*: the least fleet at once, then checked by simulation."""
    rows = CapacityPlan.objects.filter(pk=pk)
    if not rows.filter(state=CapacityState.QUEUED).update(state=CapacityState.RUNNING, phase="Reading demand"):
        return
    try:
        _answer(rows.get())
    except (ValueError, RuntimeError, SolverLost) as error:
        text = f"{str(error)[:1].upper()}{str(error)[1:].rstrip('.')}."
        rows.update(state=CapacityState.FAILED, error=text, ended_at=timezone.now())
    except Exception as error:
        rows.update(state=CapacityState.FAILED, error=f"{type(error).__name__}: {error}", ended_at=timezone.now())
        raise


def _answer(row: CapacityPlan) -> None:
    began_s, now = time.monotonic(), timezone.now()
    question = Question.model_validate(row.question)
    rows = CapacityPlan.objects.filter(pk=row.pk)
    demand, classes, types = demands.read(question, now), classes_of(question), gpu_types(question.gpus)
    present = present_scenario(demand, classes, now)
    models = [name for name in demand.models if name in present["models"]]
    made = offers({name: demand.models[name] for name in models}, types, classes)
    table = {(one.model, one.gpu_type): one for one in made}
    unserved = [name for name in models if not any(table[name, each].tokens_per_s for each in types)]
    models = [name for name in models if name not in unserved]
    if not models:
        raise ValueError("no allowed GPU type can serve any model: allow a larger one")
    sought = sought_of(question, demand, models, list(present["regions"]), types, table, plan_settings().epsilon)
    by_place = [[table[model, name] for name in types] for model in models]
    counts = least(sought)
    answer: dict[str, Any] = {
        "demand": _about(demand, question, sought, models),
        "offers": [_offered(one) for one in made],
        "unserved": unserved,
        "first_s": round(time.monotonic() - began_s, 2),
    } | _priced(question, sought, by_place, counts, types)
    rows.update(answer=answer, phase="Simulating", progress=0.05)

    def enter(phase: str) -> None:
        rows.update(phase=phase, progress=min(0.95, (time.monotonic() - began_s) / CHECK_S))

    fleet = SimulatedFleet(sought, by_place, demand, classes, present)
    ends_s = began_s + CHECK_S
    settled = settle(sought, fleet.draws, fleet.wanted, late=lambda: time.monotonic() > ends_s, enter=enter)
    best = [
        max((each for each in of.values() if each.met), key=lambda each: each.usd_per_month) if one is None else one
        for one, of in zip(settled.cheapest(fleet.wanted), settled.found, strict=True)
    ]
    counts = np.array([one.counts for one in best])
    answer |= _priced(question, sought, by_place, counts, types)
    scenario = fleet.values(counts)
    answer["scenario"] = {name: scenario[name] for name in ("fleet", "profiles", "gpus")}
    answer["check"] = _found(settled, fleet, np.array([one.worst for one in best]))
    answer["frontier"] = [
        one._asdict() | {"usd_per_month": None if one.usd_per_month is None else round(one.usd_per_month, 2)}
        for one in settled.frontier()
    ]
    answer["buy_by"] = _buy_by(question, sought, settled, demand, types, table, now)
    answer["took_s"] = round(time.monotonic() - began_s, 1)
    rows.update(answer=answer, state=CapacityState.DONE, phase="", progress=1.0, ended_at=timezone.now())


def sought_of(
    question: Question,
    demand: demands.Demand,
    models: Sequence[str],
    regions: Sequence[str],
    types: Types,
    table: Mapping[tuple[str, str], Offer],
    epsilon: float,
) -> Sought:
    """Return the question in arrays; demand has the reserve for bursts, as plans have it."""
    grown, shares, able = {}, {}, {}
    for model in models:
        own = demand.models[model]
        shares[model] = sum(own.prompt) / max(1, sum(own.prompt) + sum(own.output))
        for name in types:
            if (capability := table[model, name].capability) is not None:
                able[model, name] = capability
        for region in regions:
            level = np.array([demand.factor * own.tokens_per_s.get(region, 0.0)])
            grown[model, region] = EndpointDemand(level, level, shares[model] * level, cv=own.cv)
    reserved = with_reserve(lambda each: each.kept, Demand(0.0, 600.0, grown), able, shares)
    theta = np.array([[table[model, name].tokens_per_s for name in types] for model in models])
    within = np.array([[not table[model, name].why_not for name in types] for model in models])
    theta[(within.sum(axis=1) > 0)[:, None] & ~within] = 0.0  # where another type keeps the promise
    return Sought(
        models=models,
        regions=regions,
        gpu_types=list(types),
        demand_tokens_per_s=np.array([[float(reserved[model, region][0]) for region in regions] for model in models]),
        capability_tokens_per_s=theta,
        gpus=np.array([[table[model, name].tensor_parallel for name in types] for model in models]),
        usd_per_hour=np.array([usd for _, usd in types.values()]),
        survives_loss=question.survives_loss,
        epsilon=epsilon,
    )


def _about(demand: demands.Demand, question: Question, sought: Sought, models: Sequence[str]) -> dict[str, Any]:
    today = sum(sum(demand.models[name].tokens_per_s.values()) for name in models)
    return {
        "factor": round(demand.factor, 4),
        "months": question.over_months,
        "today_tokens_per_s": round(today, 1),
        "planned_tokens_per_s": round(today * demand.factor, 1),
        "regions": list(sought.regions),
        "remarks": demand.remarks,
    }


def _offered(one: Offer) -> dict[str, Any]:
    usd = one.usd_per_million_tokens
    return {
        "model": one.model,
        "gpu_type": one.gpu_type,
        "fits": one.row is not None,
        "tensor_parallel": one.tensor_parallel if one.row else None,
        "tokens_per_s": round(one.tokens_per_s, 1),
        "usd_per_million_tokens": None if usd is None else round(usd, 4),
        "estimated": bool(one.profile and one.profile.estimated),
        "why_not": one.why_not,
    }


def _priced(
    question: Question,
    sought: Sought,
    by_place: Sequence[Sequence[Offer]],
    counts: Counts,
    types: Types,
) -> dict[str, Any]:
    """Return the fleet by model, region and type; GPUs by region and type against those there are; dollars a month."""
    there = inventory.read().units
    fleet, gpus = [], []
    for i, j, k in np.argwhere(counts > 0).tolist():
        offer, number = by_place[i][k], int(counts[i, j, k])
        fleet.append({
            "model": offer.model, "region": sought.regions[j], "gpu_type": offer.gpu_type,
            "tensor_parallel": offer.tensor_parallel, "instances": number, "gpus": number * offer.tensor_parallel,
            "usd_per_month": round(HOURS_A_MONTH * number * offer.tensor_parallel * offer.usd_per_hour, 2),
            "estimated": bool(offer.profile and offer.profile.estimated),
        })  # fmt: skip
    used = (counts * sought.gpus[:, None, :]).sum(axis=0)
    total = dict.fromkeys(("on_demand", "reserved", "spot"), 0.0)
    for j, region in enumerate(sought.regions):
        for k, (name, (gpu_type, usd)) in enumerate(types.items()):
            have, needed = int(there.get((region, name), 0)), int(used[j, k])
            spot_usd = gpu_type.spot_usd_per_hour
            month = {
                "on_demand": needed * usd * HOURS_A_MONTH,
                "reserved": needed * usd * question.reserved * HOURS_A_MONTH,
                "spot": needed * (usd * question.spot if spot_usd is None else float(spot_usd)) * HOURS_A_MONTH,
            }
            total = {each: total[each] + month[each] for each in total}
            if needed:
                gpus.append({
                    "region": region, "gpu_type": name, "needed": needed, "have": have, "buy": max(0, needed - have),
                    "spot_assumed": spot_usd is None, **{f"usd_{each}": round(value, 2) for each, value in month.items()},
                })  # fmt: skip
    return {"fleet": fleet, "gpus": gpus, "usd_per_month": {name: round(usd, 2) for name, usd in total.items()}}


def _found(settled: Settled, fleet: SimulatedFleet, met: NDArray[np.float64]) -> dict[str, Any]:
    """Return what the simulator found of the fleet: *met*, the lowest share over the draws of requests."""
    shares = [
        {"model": model, "slo_class": name, "met_ratio": round(float(met[i, c]), 4), "target_ratio": float(fleet.wanted[c]),
         "holds": bool(met[i, c] >= fleet.wanted[c])}
        for i, model in enumerate(settled.sought.models) for c, name in enumerate(fleet.classes) if np.isfinite(met[i, c])
    ]  # fmt: skip
    return {
        "holds": all(one["holds"] for one in shares),
        "shares": shares,
        "simulations": settled.runs,
        "one_less_tried": int(settled.tried.sum()),
    }


def _buy_by(
    question: Question,
    sought: Sought,
    settled: Settled,
    demand: demands.Demand,
    types: Types,
    table: Mapping[tuple[str, str], Offer],
    now: datetime,
) -> dict[str, Any]:
    """Return when demand passes what the GPUs that there are can carry, as multiples of today's demand."""
    there = inventory.read().units
    units = np.array([[there.get((region, name), 0) for name in types] for region in sought.regions], np.int64)
    theta = np.array([[table[model, name].tokens_per_s for name in types] for model in sought.models])
    anywhere = replace(sought, capability_tokens_per_s=theta, epsilon=ANYWHERE)
    able = demand.factor * carried(anywhere, units, settled.factor)
    months = 0.0 if able < 1.0 else question.months_until(able)
    at = None if months is None else (now + months * MONTH).date().isoformat()
    return {"carries": round(able, 2), "months": months, "date": at, "known": bool(there)}
