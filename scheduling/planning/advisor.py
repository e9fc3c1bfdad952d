"""The planner that strategies follow: forecasts with bands, the fleet and its capability
become advice for each endpoint.

Live planning, simulations and experiments read `PlanInputs` and call `make_plan` for the models whose plans are due,
each at the period of its strategy (`PlansFor.period_s`), and `EndpointPlan.advice` at every tick. They differ only in
where they read the inputs. A plan is in force until its successor exists; one that has none at
`valid_until_s` is stale, and strategies then use only the load.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.bursts import POISSON_CV, UNEVEN_CV, pooled_reserve, unevenness
from scheduling.planning.capacity import Capability, instances_needed, must_run
from scheduling.planning.places import Endpoint, Fleet, Planned, problem_of
from scheduling.planning.planner import Plan, solve
from scheduling.planning.programme import SolverLost
from scheduling.scaling.endpoint import Advice, EndpointView, PlansFor

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
STARTS_AHEAD = 2.0
"""Starts whose time the plan for adding covers: one that is requested now, and some to spare."""
STALE_PERIODS = 2.0
"""Periods for which a plan is valid at least: its successor may be a whole period late."""


def at_level(plans_for: PlansFor, demand_level: str) -> PlansFor:
    """Return *plans_for* at *demand_level*: `strategy` (its own levels), `mean`, or the upper end of a band."""
    if demand_level == "strategy":
        return plans_for
    level = 0.0 if demand_level == "mean" else 1.0
    return plans_for._replace(soon=level, kept=level, by_unevenness=False)


class Band(NamedTuple):
    """A forecast of one series: tokens per second by window."""

    mean: Floats
    upper: Floats
    """Upper end of its band."""

    def level(self, towards_upper: float) -> Floats:
        """Return the forecast at a level between: 0 is the mean, 1 the upper end. Never below 0."""
        return np.maximum(0.0, self.mean + towards_upper * (self.upper - self.mean))


@dataclass(frozen=True, slots=True)
class EndpointDemand:
    """Expected demand of the callers of an endpoint, in tokens per second by window."""

    kept: Floats
    """Level for which instances are kept (`PlansFor`)."""
    soon: Floats
    """Level for which instances are added."""
    prompt: Floats
    """Prompt part of `kept`."""
    beta_tokens_per_s: float = 0.0
    """Additional room for deferred work: the rate at which it arrives, or more (`Demand.with_due`)."""
    cv: float = POISSON_CV
    """CV of its arrivals (`bursts.arrival_cv`)."""
    mean: Floats | None = None
    """Mean forecast; the margin of `kept` and `soon` above it covers forecast error. None: no margin."""
    now_tokens_per_s: float = 0.0
    """What is asked for now, deferred work included: no plan takes the endpoint below it."""

    @property
    def expected(self) -> Floats:
        return self.kept if self.mean is None else self.mean

    @classmethod
    def of(
        cls,
        prompt: Band,
        output: Band,
        plans_for: PlansFor,
        beta_tokens_per_s: float = 0.0,
        cv: float = POISSON_CV,
        now_tokens_per_s: float = 0.0,
    ) -> "EndpointDemand":
        """Return the demand that a strategy with *plans_for* plans for, from the forecasts of prompt and output tokens."""
        plans_for = plans_for.at(unevenness(cv))
        kept, soon = (prompt.level(towards) + output.level(towards) for towards in (plans_for.kept, plans_for.soon))
        mean = prompt.level(0.0) + output.level(0.0)
        return cls(kept, soon, prompt.level(plans_for.kept), beta_tokens_per_s, cv, mean, now_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of all endpoints in windows of equal length, from the one in which the plan is made."""

    start_s: float
    window_s: float
    of: Mapping[Endpoint, EndpointDemand]

    @property
    def windows(self) -> int:
        return max((len(each.kept) for each in self.of.values()), default=0)

    @property
    def ends_s(self) -> float:
        return self.start_s + self.window_s * self.windows

    def only(self, models: Set[str]) -> "Demand":
        return replace(self, of={endpoint: each for endpoint, each in self.of.items() if endpoint[0] in models})

    def with_due(
        self, due: Mapping[str, Sequence[tuple[float, float]]], now_s: float, uncounted_over_s: float = inf
    ) -> "Demand":
        """Return it with room for the deferred work that waits: *due* has (deadline, tokens) by model.

        The room is the least constant rate that serves what arrives (each endpoint's beta, without end) and what waits
        by their deadlines. Where requests are counted only once they have ended, what waits has arrived besides, within
        *uncounted_over_s*. Each region gets a share of what is added by its expected demand: the work may run anywhere.
        """
        of = dict(self.of)
        for model, work in due.items():
            arrives = sum(each.beta_tokens_per_s for endpoint, each in of.items() if endpoint[0] == model)
            more = sum(tokens for _, tokens in work) / uncounted_over_s
            tokens_per_s = max(more, must_run(work, now_s) - arrives)
            expected = {endpoint: float(each.kept.sum()) for endpoint, each in of.items() if endpoint[0] == model}
            total = sum(expected.values())
            for endpoint, tokens in expected.items():
                share = tokens / total if total > 0 else 1 / len(expected)
                beta = of[endpoint].beta_tokens_per_s + share * tokens_per_s
                of[endpoint] = replace(of[endpoint], beta_tokens_per_s=beta)
        return replace(self, of=of)

    def prompt_share(self, model: str) -> float:
        """Return the prompt share of the model's tokens; a half if none are expected."""
        rows = [each for (name, _), each in self.of.items() if name == model]
        total, prompt = float(sum(row.kept.sum() for row in rows)), float(sum(row.prompt.sum() for row in rows))
        return min(1.0, prompt / total) if total > 0 else 0.5

    def cv(self, model: str) -> float:
        """Return the CV of the arrivals of *model* in all regions together."""
        rows = [each for (name, _), each in self.of.items() if name == model]
        weights = [float(row.expected.sum()) for row in rows]
        squares = [row.cv**2 for row in rows]
        return (
            sqrt(np.average(squares, weights=weights))
            if sum(weights) > 0
            else max((row.cv for row in rows), default=0.0)
        )


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """Settings of planning."""

    period_s: float | None = None
    """Time from one plan to the next; None: that of each strategy."""
    epsilon: float = 0.8
    """Share of its own demand that a region must be able to serve."""
    time_limit_s: float = 20.0
    gap: float = 0.02
    """See `planner.solve`. A simulation makes hundreds of plans, each a tenth as long in the making as one within `GAP`."""

    def period_of(self, plans_for: PlansFor) -> float:
        return plans_for.period_s if self.period_s is None else self.period_s


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All that a plan is made from, read before anything is planned."""

    demand: Demand
    fleet: Fleet
    capability: Mapping[tuple[str, str], Capability]
    """By (model, GPU type)."""
    follows: Mapping[str, PlansFor]
    """What the plans of each model are made for."""
    settings: PlanSettings
    notes: Mapping[Endpoint, str] = field(default_factory=dict)
    """What is known of an endpoint's demand besides, for readers."""


@dataclass(frozen=True, slots=True)
class EndpointPlan:
    """Plan of one endpoint, in plain numbers, so that it can be stored in a row. Times are seconds."""

    target_instances: int
    """Instances to keep."""
    soon_instances: Sequence[int]
    """Instances to add up to, by window, each planned when first needed; empty if only the target is planned."""
    forecast_tokens_per_s: float
    """Highest planned rate of interactive work."""
    start_s: float
    window_s: float
    made_at_s: float
    period_s: float
    valid_until_s: float
    cv: float = UNEVEN_CV
    """CV of the arrivals of its model."""
    deferred_tokens_per_s: float = 0.0

    def advice(self, now_s: float) -> Advice:
        """Return the advice at *now_s*."""
        soon = None
        if self.soon_instances:
            at = int((now_s - self.start_s) // self.window_s)
            soon = self.soon_instances[min(max(at, 0), len(self.soon_instances) - 1)]
        return Advice(
            target_instances=self.target_instances,
            forecast_tokens_per_s=self.forecast_tokens_per_s,
            made_at_s=self.made_at_s,
            valid_until_s=self.valid_until_s,
            soon_instances=soon,
            next_plan_s=self.made_at_s + self.period_s,
            unevenness=unevenness(self.cv),
            deferred_tokens_per_s=self.deferred_tokens_per_s,
        )


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A plan for all endpoints together: the problem, its solution and the result for each endpoint."""

    inputs: PlanInputs
    planned: Planned
    plan: Plan
    endpoints: Mapping[Endpoint, EndpointPlan]
    reserve_tokens_per_s: Mapping[Endpoint, float]
    """Reserve beyond the highest rate of each endpoint, with which its bursts keep their SLO."""


def valid_until_s(made_at_s: float, period_s: float, forecast_ends_s: float) -> float:
    """Return until when a plan without a successor is followed: its forecast's end, and at least two periods."""
    return max(forecast_ends_s, made_at_s + STALE_PERIODS * period_s)


def make_plan(now_s: float, inputs: PlanInputs) -> FleetPlan:
    """Plan the fleet for its demand. Raises what the solver raises, and ValueError for invalid numbers."""
    demand, fleet, capability, settings = inputs.demand, inputs.fleet, inputs.capability, inputs.settings
    shares = {model: demand.prompt_share(model) for model in {name for name, _ in (*demand.of, *capability)}}
    theta = {key: each.at(shares[key[0]]) for key, each in capability.items()}
    cvs = {model: demand.cv(model) for model, _ in demand.of}
    follows = {
        model: plans_for.at(unevenness(cvs.get(model, UNEVEN_CV))) for model, plans_for in inputs.follows.items()
    }
    beta = {endpoint: each.beta_tokens_per_s for endpoint, each in demand.of.items()}
    period_s = {model: settings.period_of(follows[model]) for model, _ in demand.of}
    horizon_ends_s = {model: min(now_s + follows[model].horizon_s, demand.ends_s) for model, _ in demand.of}
    ends_s = {model: valid_until_s(now_s, period_s[model], horizon_ends_s[model]) for model, _ in demand.of}
    ahead = {model: _windows_ahead(now_s, demand, follows[model], period_s[model]) for model, _ in demand.of}
    reserved = with_reserve(lambda each: each.kept, demand, capability, shares)
    kept = {endpoint: each[ahead[endpoint[0]]] for endpoint, each in reserved.items()}
    fixed = {
        endpoint: _by_capability(endpoint, each, ahead[endpoint[0]], fleet, capability)
        for endpoint, each in demand.of.items()
        if follows[endpoint[0]].by_capability
    }

    horizon_s = max(max(horizon_ends_s.values(), default=0.0) - now_s, demand.window_s)
    load = _load_now(demand, capability, shares)
    planned = problem_of(fleet, kept, beta, theta, horizon_s, settings.epsilon, fixed, load)
    plan = solve(planned.problem, gap=settings.gap, time_limit_s=settings.time_limit_s)
    targets = plan.by_endpoint
    two_plans = {model for model in fleet.models if model in follows and follows[model].two_plans}
    last_s = max((ends_s[model] for model in two_plans & set(ends_s)), default=now_s)
    steps = min(demand.windows, ceil((last_s - demand.start_s) / demand.window_s))
    soon: Callable[[int], Ints] | None = None
    if two_plans and steps > 0:
        added = with_reserve(lambda each: each.soon, demand, capability, shares)
        asked = {endpoint: added[endpoint] if endpoint[0] in two_plans else each for endpoint, each in kept.items()}
        after = {model: ceil(STARTS_AHEAD * fleet.slowest_start_s(model) / demand.window_s) for model in two_plans}
        soon = _soon(asked, planned, fixed, targets, after, settings.gap, settings.time_limit_s / steps)
    models, regions = fleet.models, fleet.regions
    endpoints = {}
    for (model, region), each in demand.of.items():
        if (model, region) not in fleet.endpoints():
            continue
        at = models.index(model), regions.index(region)
        endpoints[model, region] = EndpointPlan(
            target_instances=int(targets[at]),
            soon_instances=SoonInstances(soon, at, steps) if soon is not None and model in two_plans else (),
            forecast_tokens_per_s=float(each.kept[ahead[model]].max(initial=0.0)),
            start_s=demand.start_s,
            window_s=demand.window_s,
            made_at_s=now_s,
            period_s=period_s[model],
            valid_until_s=ends_s[model],
            cv=cvs[model],
            deferred_tokens_per_s=each.beta_tokens_per_s,
        )
    reserve = {
        endpoint: float((kept[endpoint] - each.kept[ahead[endpoint[0]]]).max(initial=0.0))
        for endpoint, each in demand.of.items()
    }
    return FleetPlan(inputs, planned, plan, endpoints, reserve)


@dataclass(frozen=True, slots=True)
class SoonInstances(Sequence[int]):
    """Instances of the endpoint *at* (model, region) to add up to, by window; each is planned on first access."""

    planned: Callable[[int], Ints]
    at: tuple[int, int]
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, window: Any) -> Any:
        windows = range(self.steps)[window]
        if isinstance(windows, range):
            return [self[one] for one in windows]
        return int(self.planned(windows)[self.at])


def _soon(
    asked: Mapping[Endpoint, Floats],
    planned: Planned,
    fixed: Collection[Endpoint],
    targets: Ints,
    after: Mapping[str, int],
    gap: float,
    time_limit_s: float,
) -> Callable[[int], Ints]:
    """Return what plans instances (models, regions) for the demand *asked* from a window until *after* windows beyond it.

    Never more than *targets*, which are kept: more would only be removed again. *after* has the models with two plans;
    others take part with all of their demand, since they take GPUs. The next plan usually arrives before the second window.
    """
    by_need: dict[bytes, Ints] = {}

    @cache
    def of(window: int) -> Ints:
        rates = {
            endpoint: each[window : window + 1 + after[endpoint[0]]] if endpoint[0] in after else each
            for endpoint, each in asked.items()
        }
        problem = planned.asking(rates, fixed)
        # Of the same fleet, problems with the same needs are one.
        need = problem.need_tokens_per_s.tobytes() + problem.need_total_tokens_per_s.tobytes()
        if need not in by_need:
            try:
                by_need[need] = np.minimum(solve(problem, gap=gap, time_limit_s=time_limit_s).by_endpoint, targets)
            except SolverLost:  # add what is kept
                by_need[need] = targets
        return by_need[need]

    return of


def with_reserve(
    level: Callable[[EndpointDemand], Floats],
    demand: Demand,
    capability: Mapping[tuple[str, str], Capability],
    shares: Mapping[str, float],
) -> dict[Endpoint, Floats]:
    """Return the capacity needed at `Capability.at` by window for the *level* of demand to keep its SLO under bursts.

    All regions of a model are one pool, because one region's overflow goes to another: each has a share of the
    pool's reserve (`bursts.pooled_reserve`) by its demand. Of several GPU types the one that needs the most
    reserve counts. Forecast error and burstiness are independent, so the margin above the mean and the reserve
    add up as standard deviations do.
    """
    needed = {endpoint: level(each) for endpoint, each in demand.of.items()}
    for model in {name for name, _ in demand.of}:
        pool = {endpoint: each for endpoint, each in demand.of.items() if endpoint[0] == model}
        asked = np.array([needed[endpoint] for endpoint in pool])
        total = asked.sum(axis=0)
        able = [each for (name, _), each in capability.items() if name == model]
        if not total.any() or not able:
            continue
        cv, share = demand.cv(model), shares[model]
        able = [replace(each, reserve=pooled_reserve(each.reserve, asked.sum(axis=1))) for each in able]
        reserve = np.max([each.with_reserve(total, share, cv) for each in able], axis=0) - total
        above = (asked - np.minimum([each.expected for each in pool.values()], asked)).sum(axis=0)
        most = total - above + np.hypot(above, reserve)
        factor = np.divide(most, total, out=np.ones_like(total), where=total > 0)
        needed.update({endpoint: needed[endpoint] * factor for endpoint in pool})
    return needed


def _load_now(
    demand: Demand, capability: Mapping[tuple[str, str], Capability], shares: Mapping[str, float]
) -> dict[Endpoint, float]:
    """Return the capacity that serves what is asked for now, with the reserve that forecasts have."""
    now = {end: replace(each, kept=np.array([each.now_tokens_per_s]), mean=None) for end, each in demand.of.items()}
    needed = with_reserve(lambda each: each.kept, replace(demand, of=now), capability, shares)
    return {endpoint: float(rates[0]) for endpoint, rates in needed.items()}


def _windows_ahead(now_s: float, demand: Demand, plans_for: PlansFor, period_s: float) -> slice:
    """Return the windows of a plan made at *now_s*: those that begin within its
    horizon, or before its successor exists.

    With Algorithm 2, those that begin before its successor's first. It plans at the start of each window for the next
    (4.3.2); with a period of several windows, for as many.
    """
    if plans_for.by_capability and demand.windows > 1:
        return slice(1, 1 + ceil(period_s / demand.window_s))
    return slice(ceil((now_s + max(plans_for.horizon_s, period_s) - demand.start_s) / demand.window_s))


def _by_capability(
    endpoint: Endpoint,
    demand: EndpointDemand,
    ahead: slice,
    fleet: Fleet,
    capability: Mapping[tuple[str, str], Capability],
) -> int:
    """Return N of Algorithm 2 for the windows *ahead*, by the GPU type of most of the endpoint's instances.

    The maximum if no number could serve it.
    """
    rows = {place: row for place, row in fleet.deployments.items() if place[:2] == endpoint}
    if not rows:
        return 0
    model, _, gpu_type = max(rows, key=lambda place: rows[place].instances)
    needed = 0
    for prompt, total in zip(demand.prompt[ahead].tolist(), demand.kept[ahead].tolist(), strict=True):
        share = prompt / total if total > 0 else 0.5
        with_beta = max(total + demand.beta_tokens_per_s, demand.now_tokens_per_s)
        try:
            able = capability[model, gpu_type]
            count = instances_needed(able, share * with_beta, (1 - share) * with_beta, demand.cv)
        except (KeyError, ValueError):
            return sum(row.max_instances for row in rows.values())
        needed = max(needed, count)
    return needed


@dataclass(slots=True)
class SimulatedPlanner:
    """The planner of a simulation: plans each strategy's models at multiples of its period, and advises at every tick."""

    inputs_at: Callable[[float, Sequence[EndpointView]], PlanInputs]
    """Returns the inputs at a time, with the observed instances; no demand in them may come from what happens later."""
    follows: Mapping[str, PlansFor]
    settings: PlanSettings
    due_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the held work (`EndpointView.due`) that plans of a model have room for; none without one."""
    make: Callable[..., FleetPlan] = make_plan
    """`make_plan`, or a cache of it."""
    plans: dict[Endpoint, EndpointPlan] = field(default_factory=dict, init=False)
    """In force."""
    made: list[FleetPlan] = field(default_factory=list, init=False)
    """All plans, oldest first."""
    _due_s: dict[str, float] = field(default_factory=dict, init=False)
    """By model."""

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> list[Advice | None]:
        """Implement `scheduling.simulation.strategies.Advisor`."""
        due = {model for model in self.follows if now_s >= self._due_s.get(model, -inf)}
        if due:
            self._renew(now_s, due, views)
        plans = [self.plans.get((view.model, view.region)) for view in views]
        return [plan.advice(now_s) if plan else None for plan in plans]

    def _renew(self, now_s: float, models: Set[str], views: Sequence[EndpointView]) -> None:
        for model in models:
            period_s = self.settings.period_of(self.follows[model])
            self._due_s[model] = (now_s // period_s + 1) * period_s
        inputs = self.inputs_at(now_s, views)
        held = {
            view.model: [(due_s, self.due_shares[view.model] * tokens) for due_s, tokens in view.due]
            for view in views
            if view.model in models & self.due_shares.keys()
        }
        demand = inputs.demand.only(models).with_due(held, now_s)
        inputs = replace(inputs, demand=demand, fleet=inputs.fleet.only(models))
        if inputs.fleet.deployments:
            try:
                made = self.make(now_s, inputs)
            except SolverLost:  # as live, the plan before stays in force
                return
            self.made.append(made)
            self.plans |= made.endpoints
