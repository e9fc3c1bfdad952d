"""The live fleet as a scenario: inventory, measured round trips, dispatching, scaling and planning, without demand."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone
from msgspec import to_builtins

from controlplane.accounts.models import Tenant
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import (
    Deployment,
    Instance,
    Model,
    Region,
    ScheduledMinimum,
    SloClass,
    SloKind,
    Tier,
    WeightedTarget,
)
from controlplane.fleet.selectors import gpus_fitted, region_latencies_ms, scheduled_minimums, without_prefix_cache
from controlplane.fleet.spot.selectors import reclaim_times
from controlplane.fleet.swaps import times
from controlplane.gateway.models import LedgerRow
from controlplane.planning.bundles import CUSTOM, presents
from controlplane.planning.execution import strategies
from controlplane.planning.forecasts.services import forecaster_name
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.plans import inventory
from controlplane.planning.plans.capability import BLOCK_TOKENS
from controlplane.planning.plans.services import plan_settings
from controlplane.tunable import Tunable
from controlplane.tuning.selectors import tuned
from scheduling.applications.prewarming import HERMES
from scheduling.model_task import Task
from scheduling.policy import live_policy
from scheduling.scaling import NO_STRATEGY, STRATEGIES, make_strategy

TRACES = 500
"""Number of newest requests whose decision traces give round trips."""


def scenario_of(fleet: inventory.Fleet, rows: QuerySet[LedgerRow], at: datetime | None = None) -> dict[str, Any]:
    """Return all scenario tables except demand, for models with a profile; round trips come from *rows*. It begins at *at*,
    or now.
    """
    tables = live_scenario(fleet, rows)
    values: dict[str, Any] = {"title": "The live fleet", "sample_s": 60.0, **tables, **scaling(fleet, tables)}
    for name in values["models"]:
        if marks := marks_of(name):
            values["models"][name]["marks"] = marks
    for present in presents(Model.objects.filter(name__in=list(tables["models"]))).values():
        if present.name != CUSTOM:
            values["models"][present.model.name]["bundle"] = present.name
    values["begins_s"] = (at or timezone.now()).timestamp()
    for row in Region.objects.filter(name__in=list(values["regions"])):
        holidays = [str(day) for day in sorted(row.days_off)]
        values["regions"][row.name] |= {"time_zone": row.time_zone or settings.TIME_ZONE, "holidays": holidays}
    values["schedules"] = [_schedule_of(row) for row in scheduled_minimums() if row.model.name in values["models"]]
    return without_none(values)  # type: ignore[no-any-return]


def _schedule_of(row: ScheduledMinimum) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("instances", "begins", "ends")},
        "model": row.model.name,
        "region": row.region.name if row.region else None,
        "weekdays": row.weekdays.split(),
        "time_zone": row.time_zone or settings.TIME_ZONE,
        "except_on": row.except_on.split(),
    }


def scaling(fleet: inventory.Fleet, tables: dict[str, Any]) -> dict[str, Any]:
    """Return live strategies, forecasters, bounds, floor and planner. Without an acting strategy, only the floor."""
    policies = {row.model.name: row for row in ScalingPolicy.objects.select_related("model")}
    endpoints = []
    for endpoint in tables["endpoints"]:
        key = endpoint["model"], endpoint["region"]
        own = [row for place, row in fleet.deployments.items() if place[:2] == key]
        bounds = {name: sum(getattr(row, name) for row in own) for name in ("min_instances", "max_instances")}
        policy = policies.get(endpoint["model"])
        acts = policy is not None and policy.mode in (PolicyMode.AUTO, PolicyMode.ASK)
        followed = strategy_of(policy) if policy is not None and acts else floor_alone(tuned(endpoint["model"]))
        floor_marks = {"floor_cooldown_s": tuned(endpoint["model"]).SCALE_COOLDOWN_S}
        forecaster = {"forecaster": forecaster_name(endpoint["model"])}
        other = {"niw_share": tuned(endpoint["model"]).PLAN_NIW_BUFFER}
        endpoints.append({**endpoint, **followed, **bounds, **floor_marks, **forecaster, **other})
    plans = plan_settings()
    return {
        "endpoints": endpoints,
        "scaling": {
            **floor_alone(tuned()),
            "min_instances": 0,
            "max_instances": 1,
            "floor": tuned().FLOOR,
            "floor_cooldown_s": tuned().SCALE_COOLDOWN_S,
        },
        "planner": {
            **({} if plans.period_s is None else {"period_s": float(plans.period_s)}),
            "epsilon": plans.epsilon,
            "time_limit_s": float(plans.time_limit_s),
        },
    }


def marks_of(model: str) -> dict[str, dict[str, float]]:
    """Return the marks set for *model* by strategy, where they differ from the strategy's own."""
    given = {}
    for name in STRATEGIES:
        usual = make_strategy(name)
        marks = strategies.marks(name, tuned(model))
        if differs := {key: value for key, value in marks.items() if getattr(usual, key) != value}:
            given[name] = differs
    return given


def strategy_of(policy: ScalingPolicy) -> dict[str, Any]:
    """Return the strategy of *policy* with its parameters and the marks of its model's settings."""
    marks = strategies.marks(policy.strategy, tuned(policy.model.name))
    return {"strategy": policy.strategy, "parameters": {**marks, **policy.parameters}}


def floor_alone(values: Tunable) -> dict[str, Any]:
    """Return the floor of a model without a strategy, with its marks."""
    return {"strategy": NO_STRATEGY, "parameters": strategies.marks(NO_STRATEGY, values)}


def without_none(value: Any) -> Any:
    """Return *value* as read back from TOML, which has no None."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value


def round_trips_s(rows: QuerySet[LedgerRow]) -> dict[tuple[str, str], float]:
    """Return the measured dispatch round trip by endpoint: the median over the newest decisions."""
    known: dict[tuple[str, str], list[float]] = {}
    for model, region, trace in rows.order_by("-arrived_at").values_list("model", "region", "trace")[:TRACES]:
        for step in trace:
            if round_trip_ms := step.get("round_trip_ms"):
                known.setdefault((model, region), []).append(round_trip_ms / 1000)
    return {endpoint: float(np.median(measured_s)) for endpoint, measured_s in known.items()}


def offload_table(row: Deployment) -> dict[str, Any]:
    """Return the columns of a group of *row* for KV in CPU memory."""
    names = ("offload_tokens", "restore_s", "restore_s_per_token")
    return dict(zip(names, row.offload_of(row.kv_offload_gib), strict=True)) if row.kv_offload_gib else {}


def live_scenario(fleet: inventory.Fleet, rows: QuerySet[LedgerRow]) -> dict[str, Any]:
    """Return the scenario tables of the fleet and its dispatching; demand and scaling are left to the caller.

    Each deployment with a profile has its maximum number of instances, existing ones ready; shared GPUs are as at
    present. Round trips come from *rows*, latencies between regions from the inventory, marks from each model's settings.
    """
    from scheduling.routing.regions import latency_ms
    from scheduling.simulation.scenario.fleet import ProfileOf

    donated = _donated()
    reclaim_s = reclaim_times(timezone.now()).expected_s
    trips_s, shared, fitted, uncached = round_trips_s(rows), _shared(), gpus_fitted(), without_prefix_cache()
    tables: dict[str, Any] = {name: {} for name in ("models", "gpus", "regions", "latency_ms", "profiles", "fleet")}
    deployments: dict[tuple[str, str], list[Deployment]] = {}
    for place, row in fleet.deployments.items():
        profile = row.profile()
        if profile is None or not row.max_instances:
            continue
        model, region, gpu = place
        tables["models"][model] = {
            "context_tokens": row.longest_request_tokens,
            **({"task": row.model.task} if row.model.task != Task.GENERATE else {}),
        }
        prices = {
            "usd_per_hour": row.gpu_type.on_demand_usd_per_hour,
            "spot_usd_per_hour": row.gpu_type.spot_usd_per_hour,
        }
        tables["gpus"][gpu] = {name: float(usd or 0) for name, usd in prices.items()}
        tables["gpus"][gpu]["count"] = {at: there for (at, name), there in fitted.items() if name == gpu}
        tables["regions"][region] = {}
        tables["profiles"][model, gpu, row.tensor_parallel] = ProfileOf.table(model, gpu, profile, row.tensor_parallel)
        members = shared.members.get(place, [])
        most = max(0, row.max_instances - len(members))
        least = max(row.min_instances - len(members), 0 if members else 1)
        ready = min(max(fleet.present[place] - shared.present[place], least), most)
        spot = min(donated[place], most - ready)
        table = {
            "model": model,
            "regions": [region],
            "gpu": gpu,
            "tensor_parallel": row.tensor_parallel,
            "instances": ready,
            "empty": most - ready - spot,
            "kv_tokens": max(BLOCK_TOKENS, row.expected_kv_tokens),
            "max_num_seqs": row.max_num_seqs,
            "max_num_batched_tokens": max(row.max_num_batched_tokens, row.max_num_seqs),
            "max_loras": row.max_loras,
            "max_cpu_loras": row.max_cpu_loras,
            "block_size_tokens": BLOCK_TOKENS,
            "prefix_caching": row.pk not in uncached,
            "queue": row.scheduling_policy,
            # A released instance is stopped, and restarts like any other, unless it is donated.
            "start_s": fleet.starts.of(model, gpu).seconds,
            **({"redeploy_s": seen.seconds} if (seen := fleet.starts.seen.get((model, gpu))) else {}),
            **({"spot": spot} if spot else {}),
            **offload_table(row),
            **({"reclaim_s": reclaim_s} if tuned(model).SPOT_DONATE else {}),
            **({"pull_s": pull_s} if (pull_s := fleet.pulls_s.get((model, region), 0.0)) else {}),
        }
        tables["fleet"][place] = [table] if most else []
        tables["fleet"][place] += [table | {"empty": 0} | member for member in members]
        deployments.setdefault((model, region), []).append(row)
    known, columns = tables["models"], ("name", "fallback__name", "fallback_wait_s")
    falls_back = Model.objects.filter(name__in=known, fallback__name__in=known, fallback__active=True)
    for name, fallback, wait_s in falls_back.values_list(*columns):
        known[name] |= {"fallback": fallback, "fallback_wait_s": wait_s}
    known_ms, regions = region_latencies_ms(), list(tables["regions"])
    tables["latency_ms"] = {
        origin: {target: float(latency_ms(known_ms, origin, target)) for target in regions} for origin in regions
    }
    shares_spot = any(tuned(model).SPOT_DONATE and tuned(model).SPOT_REDEPLOY for model, _ in deployments)
    return {
        **tables,
        **({"delays": {"local_weights_s": tuned().SPOT_REDEPLOY_S}} if shares_spot else {}),
        "profiles": list(tables["profiles"].values()),
        "fleet": [table for of_place in tables["fleet"].values() for table in of_place],
        **({"residency": bound} if (bound := residency()) else {}),
        **({"swap_groups": shared.groups} if shared.groups else {}),
        **({"weighted_targets": shares} if (shares := _weighted_targets(tables["models"])) else {}),
        "classes": {
            row.name: _class(row) for row in SloClass.objects.select_related("degrades_to").order_by("priority", "name")
        },
        "endpoints": [
            {"model": model, "region": region}
            | to_builtins(live_policy(partial(getattr, tuned(model)), rows))
            | {"dispatch_round_trip_ms": 1000 * trips_s.get((model, region), 0.0)}
            for (model, region), rows in deployments.items()
        ],
        "policies": {
            **to_builtins(live_policy(partial(getattr, tuned()))),
            "max_hold_s": tuned().MAX_HOLD_S,
            "prewarming": HERMES,
            "late_runs_last": tuned().LATE_RUNS_LAST,
            "prewarm_k": tuned().PREWARM_K,
            "prewarm_share": tuned().PREWARM_SHARE,
            "share_spot": shares_spot,
        },
    }


def residency() -> dict[str, list[str]]:
    """Return the regions to which tenants are bound, by tenant; of none that may be served anywhere."""
    tenants = Tenant.objects.filter(regions__isnull=False).distinct().prefetch_related("regions")
    return {tenant.name: [*tenant.residency] for tenant in tenants}


def _weighted_targets(models: Collection[str]) -> dict[str, dict[str, float]]:
    """Return the weights of the targets among *models*, by public name, of names with any."""
    shares: dict[str, dict[str, float]] = {}
    for row in WeightedTarget.objects.filter(active=True, target__in=models, weight__gt=0).order_by("name", "target"):
        shares.setdefault(row.name, {})[row.target] = row.weight
    return shares


def _donated() -> Counter[inventory.Place]:
    """Return the number of donated instances by (model, region, GPU type) name."""
    rows = Instance.objects.filter(state=InstanceState.DONATED, deployment__active=True).order_by()
    names = (f"deployment__{name}__name" for name in ("model", "region", "gpu_type"))
    return Counter(rows.values_list(*names))


def _class(row: SloClass) -> dict[str, Any]:
    return {
        "kind": str(row.kind),
        "ttft_ms": row.ttft_target_ms,
        "itl_ms": row.itl_target_ms,
        "e2e_ms": row.e2e_target_ms,
        "percentile": row.percentile,
        "deadline_s": row.deadline_s,
        "priority": row.priority,
        "if_unreachable": row.if_unreachable,
        "degrades_to": row.degrades_to.name if row.degrades_to else None,
        **({"on_reclaim": str(row.on_reclaim)} if row.kind == SloKind.OPPORTUNISTIC else {}),
    }


@dataclass(slots=True)
class Shared:
    """Instances that share GPUs, each as its own fleet table."""

    members: dict[inventory.Place, list[dict[str, Any]]] = field(default_factory=dict)
    """Table keys per instance, in addition to its deployment's."""
    present: Counter[inventory.Place] = field(default_factory=Counter)
    """Instances that are awake or waking."""
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    """Tables of `[swap_groups]`."""


def _shared() -> Shared:
    """Return swap groups: members, awake instances, and sleep and wake times."""
    shared, known = Shared(), None
    rows = (
        Instance.objects.filter(swap_group__isnull=False, held="").exclude(state=InstanceState.FAILED).order_by("name")
    )
    of = ("model", "region", "gpu_type")
    for row in rows.select_related("swap_group", *(f"deployment__{each}" for each in of)):
        known = known or times.read()
        deployment, group = row.deployment, row.swap_group
        assert group is not None
        place = deployment.model.name, deployment.region.name, deployment.gpu_type.name
        awake = row.state in PRESENT
        shared.present[place] += awake
        counted = "instances" if awake else "empty" if row.tier == Tier.STOPPED else "asleep"
        shared.members.setdefault(place, []).append(
            {
                "instances": 0,
                counted: 1,
                "sharing": {
                    "group": group.name,
                    "sleep_s": known.sleep(deployment, Tier.CPU).seconds,
                    "wake_s": known.load(deployment, Tier.CPU).seconds,
                    "reload_s": known.load(deployment, Tier.STORAGE).seconds,
                    "weights_gb": deployment.model.weights_bytes / 1e9,
                },
            }
        )
        if group.cpu_memory_bytes is not None:
            shared.groups[group.name] = {"cpu_memory_gb": group.cpu_memory_bytes / 1e9}
    return shared
