"""The last hours of the ledger under each strategy: what each would have cost and achieved with the fleet as it is.

The fleet is simulated from its rows (profiles, bounds, limits, prices), the requests are the ledger's, and plans are made
inside as they are live: by the forecasts that had been made by then, never by what came later. Regions are those that
served a request, since the ledger does not know where its caller was.
"""

import logging
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from django.conf import settings
from django.db.models import QuerySet
from numpy.typing import NDArray

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, SloClass, SloKind
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.json_values import plain
from controlplane.planning.models import Forecast, StrategyComparison
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans import services as plans

if TYPE_CHECKING:
    from scheduling.scaling import Advice, EndpointView
    from scheduling.simulation.cluster.description import Cluster
    from scheduling.simulation.measures.results import Promise
    from scheduling.simulation.strategies import StrategyRun
    from scheduling.simulation.workload.requests import Requests

logger = logging.getLogger(__name__)
LEAST_REQUESTS = 200
LEAST = timedelta(minutes=5)
TOO_LITTLE = "Too little to compare"
AGAIN_S = 120.0
"""When there was too little, it is tried again after this."""
LEFT_OUT = frozenset({"siloed"})
"""Needs separate pools for each kind of work, which this fleet does not have."""
USUAL_START_S = 120.0
"""From asking for an instance until it serves, where none was seen to start."""
LONGEST_START_S = 7200.0
"""What takes longer (SageServe 7.1: two hours, with weights from afar) happened while the stack was stopped."""
SETTLE_S = 600.0
"""After the last request came: hours are counted so long at the most, or one that waits would add hours of everything."""
BLOCK_TOKENS = 16
TRACES = 500
"""Newest requests by whose decision traces round trips are known."""


def compare_strategies(hours: float, now: datetime) -> StrategyComparison:
    """Simulate the last *hours* under every strategy and keep the result as a row.

    With too few requests, the row notes it and has no lines. Bounded in requests and time by the settings.
    """
    since = now - timedelta(hours=hours)
    rows = LedgerRow.objects.filter(arrived_at__gte=since, arrived_at__lt=now, outcome=Outcome.DONE)
    rows = rows.filter(prompt_tokens__gt=0, output_tokens__gt=0)
    fleet = inventory.read(set(Deployment.objects.filter(active=True).values_list("model__name", flat=True)))
    replay = Replay.read(rows, fleet, now)
    missing = _missing(replay)
    if replay is None or missing:
        # One such row is enough: a newer one stands for it.
        StrategyComparison.objects.filter(note__startswith=TOO_LITTLE).delete()
        count = len(replay.arrived_s) if replay else 0
        note = f"{TOO_LITTLE}: {missing}."
        return StrategyComparison.objects.create(from_at=since, to_at=now, requests=count, note=note)
    began = time.monotonic()
    lines: list[dict[str, Any]] = []
    notes = [*replay.notes]
    names = [name for name in strategies.names() if name not in LEFT_OUT]
    for done, name in enumerate(names):
        if time.monotonic() - began > settings.COMPARE_LIMIT_S:
            notes.append(f"the time was over after {done} of {len(names)} strategies")
            break
        try:
            lines.append(replay.line(name))
        except Exception as error:
            logger.exception("planning: %s could not be simulated", name)
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return StrategyComparison.objects.create(
        from_at=replay.from_at,
        to_at=replay.to_at,
        requests=len(replay.arrived_s),
        rows=plain(lines),
        note="; ".join(notes)[:255],
    )


def _missing(replay: "Replay | None") -> str:
    """What is missing for a comparison, in words; empty if there is enough. More than enough requests are never too few
    minutes: a busy fleet's newest ones, cut at `COMPARE_REQUESTS`, are compared whatever time they cover."""
    count = len(replay.arrived_s) if replay else 0
    if replay is None or count < LEAST_REQUESTS:
        return f"{count} requests of the {LEAST_REQUESTS} that are needed"
    covered = replay.to_at - replay.from_at
    if covered < LEAST and not replay.cut:
        return f"requests of {covered.seconds} s; {LEAST.seconds // 60} minutes are needed"
    return ""


@dataclass(slots=True)
class Replay:
    """Requests of the ledger and the fleet that they are sent to."""

    fleet: inventory.Fleet
    deployments: list[Deployment]
    from_at: datetime
    to_at: datetime
    arrived_s: list[float]
    cluster: "Cluster"
    requests: "Requests"
    promises: list["Promise"]
    interactive: list[bool]
    """By number of the class: whether latencies of its requests are reported."""
    usd_per_hour: NDArray[np.float64]
    """By instance of the cluster."""
    cut: bool = False
    """Whether there were more requests than are simulated."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, rows: QuerySet[LedgerRow], fleet: inventory.Fleet, now: datetime) -> "Replay | None":
        """The newest requests that the fleet as it is could serve; None if there are none."""
        from scheduling.queueing.ordering import due_s
        from scheduling.simulation.workload.requests import make_requests

        deployments = [row for row in fleet.deployments.values() if row.max_instances and row.profile() is not None]
        endpoints = {(row.model.name, row.region.name) for row in deployments}
        columns = (
            "arrived_at",
            "model",
            "region",
            "slo_class",
            "prompt_tokens",
            "output_tokens",
            "predicted_output_tokens",
        )
        newest = rows.order_by("-arrived_at").values_list(*columns)[: settings.COMPARE_REQUESTS]
        replayed = [row for row in reversed(newest) if (row[1], row[2]) in endpoints]
        if not replayed:
            return None
        cluster, usd = _cluster(fleet, deployments, start_s(), round_trips_s(rows))
        from_at = replayed[0][0]
        classes = list(SloClass.objects.order_by("priority", "name"))
        numbers = {row.name: number for number, row in enumerate(classes)}
        promises = [_promise(row) for row in classes]
        _, models, regions, names, prompt, output, predicted = zip(*replayed, strict=True)
        model = np.array([cluster.models.index(name) for name in models])
        longest = np.array(cluster.longest_tokens())[model]
        output_tokens = np.minimum(output, longest - 1)
        prompt_tokens = np.minimum(prompt, longest - output_tokens)
        slo_class = np.array([numbers.get(name, 0) for name in names])
        arrived_s = [(row[0] - from_at).total_seconds() for row in replayed]
        requests = make_requests(
            arrived_s,
            prompt_tokens,
            output_tokens,
            model=model,
            region=np.array([cluster.regions.index(name) for name in regions]),
            predicted_tokens=np.clip(predicted, 1, longest - prompt_tokens),
            slo_class=slo_class,
            priority=np.array([row.priority for row in classes])[slo_class],
            deadline_s=np.array([due_s(each.deadline_s, each.e2e_s, each.ttft_s) for each in promises])[slo_class],
        )
        notes = []
        cut = len(newest) == settings.COMPARE_REQUESTS
        if cut:
            minutes = (now - replayed[0][0]).total_seconds() / 60
            notes.append(f"the newest {settings.COMPARE_REQUESTS:,} requests, of {minutes:.1f} min")
        return cls(
            fleet=fleet,
            deployments=deployments,
            from_at=from_at,
            to_at=now,
            arrived_s=arrived_s,
            cluster=cluster,
            requests=requests,
            promises=promises,
            interactive=[row.kind == SloKind.INTERACTIVE for row in classes],
            usd_per_hour=usd,
            cut=cut,
            notes=notes,
        )

    def line(self, name: str) -> dict[str, Any]:
        """What came of the strategy *name* with its standard parameters."""
        from scheduling.simulation.strategies import Bounds, run_strategy

        strategy = strategies.make(name, {})
        bounds = Bounds(
            min(row.min_instances for row in self.deployments), max(row.max_instances for row in self.deployments)
        )
        advisor = Advisor(self, name) if strategy.uses_advice else None
        began = time.perf_counter()
        until_s = self.arrived_s[-1] + SETTLE_S
        run = run_strategy(self.cluster, self.requests, strategy, bounds=bounds, advisor=advisor, until_s=until_s)
        logger.info("planning: %s over %d requests in %.2f s", name, len(self.arrived_s), time.perf_counter() - began)
        return {"strategy": name, **self._measured(run)}

    def _measured(self, run: "StrategyRun") -> dict[str, Any]:
        from scheduling.simulation.cluster.world import State
        from scheduling.simulation.measures.results import kept, latency_s

        result = run.result
        hours = result.state_s / 3600
        paid = hours.sum(axis=1) - hours[:, State.EMPTY] - hours[:, State.SPOT]
        starting = [State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING, State.SWAPPING]
        judged, met = kept(result, self.promises)
        shown = np.array(self.interactive)[result.requests.slo_class]
        shown = shown if shown.any() else np.ones_like(shown)

        def p95_ms(which: str) -> float | None:
            values = latency_s(result, which)[shown]
            return round(float(np.nanpercentile(values, 95)) * 1000, 1) if np.isfinite(values).any() else None

        return {
            "instance_hours": round(float(paid.sum()), 3),
            "usd": round(float((paid * self.usd_per_hour).sum()), 3),
            "p95_ttft_ms": p95_ms("ttft"),
            "p95_e2e_ms": p95_ms("e2e"),
            "slo_met": round(float(met.sum() / judged.sum()), 4) if judged.any() else None,
            "waste_hours": round(float(hours[:, starting].sum()), 3),
            "moves": int(result.counters["scale_outs"] + result.counters["scale_ins"]),
        }


class _Plan(NamedTuple):
    made_at_s: float
    start_s: float
    """Begin of the first window."""
    of: dict[str, tuple[int, float, list[float], list[float]]]
    """By endpoint: instances, tokens a second that they serve, those of the windows planned for, and those to add for."""


class Advisor:
    """Plans inside a simulation, made as they are live: same problem, same solver, forecasts of that time."""

    def __init__(self, replay: Replay, strategy: str = "") -> None:
        """*strategy* is who follows the plans."""
        self._band, self._towards = plans.levels(strategy)
        self.every_s = float(min(settings.PLAN_EVERY_S, settings.FORECAST_WINDOW_S))
        self._plan: _Plan | None = None
        self._replay = replay
        self._capability = capability.read(replay.fleet, replay.to_at)
        recent = timedelta(seconds=plans.RECENT.total_seconds() + 60)
        self._counted = demand.read(replay.from_at - recent, replay.to_at, demand.MINUTE_S)
        self._horizon = timedelta(seconds=settings.FORECAST_WINDOW_S * settings.FORECAST_WINDOWS)
        within = timedelta(seconds=2 * max(settings.FORECAST_EVERY_S, settings.FORECAST_WINDOW_S))
        rows = Forecast.objects.filter(
            slo_class="", made_at__gte=replay.from_at - within, made_at__lt=replay.to_at
        ).order_by("made_at")
        self._within_s = within.total_seconds()
        self._forecasts: dict[tuple[str, str, str], tuple[list[float], list[Forecast]]] = {}
        for row in rows:
            times, forecasts = self._forecasts.setdefault((row.model, row.region, row.quantity), ([], []))
            times.append(row.made_at.timestamp())
            forecasts.append(row)

    def advise(self, now_s: float, views: Sequence["EndpointView"]) -> list["Advice | None"]:
        """As live: make a new plan when it is due; in between, shift its windows with time."""
        from scheduling.scaling import Advice, soon_of

        if self._plan is None or now_s - self._plan.made_at_s >= settings.PLAN_EVERY_S - 1.0:
            self._plan = self._solve(now_s, views)
        plan, window_s = self._plan, float(settings.FORECAST_WINDOW_S)
        advice: list[Advice | None] = []
        for view in views:
            target, able, windows, windows_soon = plan.of[view.key]
            soon = soon_of(target, windows, window_s, now_s - plan.start_s, windows_soon)
            until_s = plan.made_at_s + settings.PLAN_EVERY_S
            peak = max(windows, default=0.0)
            advice.append(Advice(target, peak, plan.made_at_s, until_s, able / target if target else 0.0, soon))
        return advice

    def _solve(self, now_s: float, views: Sequence["EndpointView"]) -> "_Plan":
        at = self._replay.from_at + timedelta(seconds=now_s)
        endpoints = [(view.model, view.region) for view in views]
        expected = {endpoint: self._expected(endpoint, at, self._towards.kept) for endpoint in endpoints}
        shorter = {endpoint: self._expected(endpoint, at, self._towards.soon) for endpoint in endpoints}
        soon = {endpoint: prompt + output for endpoint, (prompt, output) in shorter.items()}
        share = self._prompt_share(expected)
        theta = {key: served.at(share.get(key[0], 0.5)) for key, served in self._capability.items()}
        fleet = replace(self._replay.fleet, present=self._present(views), spare=Counter())
        totals = {endpoint: prompt + output for endpoint, (prompt, output) in expected.items()}
        planned = inventory.problem_of(fleet, totals, {}, theta, self._horizon, settings.PLAN_EPSILON)
        plan = plans.solve(planned.problem)
        targets = plan.targets.sum(axis=2)
        problem = planned.problem
        of = {}
        for view in views:
            i, j = problem.models.index(view.model), problem.regions.index(view.region)
            able = float((plan.targets[i, j] * problem.capability_tokens_per_s[i]).sum())
            endpoint = (view.model, view.region)
            of[view.key] = int(targets[i, j]), able, totals[endpoint].tolist(), soon[endpoint].tolist()
        into_s = (at - demand.window_start(at, settings.FORECAST_WINDOW_S)).total_seconds()
        return _Plan(now_s, now_s - into_s, of)

    def _expected(
        self, endpoint: demand.Endpoint, at: datetime, towards: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Prompt and output tokens a second of the windows to come, as known *at* that time (`plans.ahead`)."""
        start = demand.window_start(at, settings.FORECAST_WINDOW_S)
        tokens_per_s = []
        for quantity in demand.COLUMNS:
            times, rows = self._forecasts.get((*endpoint, quantity), ([], []))
            number = bisect_right(times, at.timestamp()) - 1
            values = None
            if number >= 0 and at.timestamp() - times[number] <= self._within_s:
                values = plans.ahead(rows[number], start, settings.FORECAST_WINDOWS, self._band, towards)
            if values is None:
                until = int((at - self._counted.start).total_seconds() // demand.MINUTE_S)
                last = self._counted.of(endpoint, quantity)[max(0, until - 10) : until]
                highest = float(np.nanmax(last)) if np.isfinite(last).any() else 0.0
                values = np.full(settings.FORECAST_WINDOWS, highest)
            tokens_per_s.append(values)
        return tokens_per_s[0], tokens_per_s[1]

    @staticmethod
    def _prompt_share(
        expected: dict[demand.Endpoint, tuple[NDArray[np.float64], NDArray[np.float64]]],
    ) -> dict[str, float]:
        prompt: defaultdict[str, float] = defaultdict(float)
        total: defaultdict[str, float] = defaultdict(float)
        for (model, _), (prompts, outputs) in expected.items():
            prompt[model] += float(prompts.sum())
            total[model] += float(prompts.sum() + outputs.sum())
        return {model: min(1.0, prompt[model] / total[model]) for model in total if total[model] > 0}

    def _present(self, views: Sequence["EndpointView"]) -> Counter[tuple[str, str, str]]:
        """Instances of each view, on the endpoint's deployments in their order."""
        present: Counter[tuple[str, str, str]] = Counter()
        left = {(view.model, view.region): view.instances for view in views}
        for (model, region, gpu_type), row in self._replay.fleet.deployments.items():
            count = min(left.get((model, region), 0), row.max_instances)
            present[model, region, gpu_type] = count
            left[model, region] = left.get((model, region), 0) - count
        return present


def start_s() -> float:
    """Median time from asking for an instance until it served, over the last that were seen to start."""
    moves = Event.objects.filter(kind="instance.moved").order_by("-pk")[:1000]
    asked: dict[str, datetime] = {}
    took: list[float] = []
    for subject, at, after in reversed(moves.values_list("subject_id", "at", "after")):
        match after.get("state"):
            case InstanceState.PROVISIONING:
                asked[subject] = at
            case InstanceState.READY if subject in asked:
                took.append((at - asked.pop(subject)).total_seconds())
    took = [each for each in took if each <= LONGEST_START_S]
    return float(np.median(took)) if took else USUAL_START_S


def round_trips_s(rows: QuerySet[LedgerRow]) -> dict[tuple[str, str], float]:
    """The dispatch round trip that was measured, by endpoint: the median of what the newest decisions knew."""
    known: dict[tuple[str, str], list[float]] = {}
    for model, region, trace in rows.order_by("-arrived_at").values_list("model", "region", "trace")[:TRACES]:
        for step in trace:
            if round_trip_ms := step.get("round_trip_ms"):
                known.setdefault((model, region), []).append(round_trip_ms / 1000)
    return {endpoint: float(np.median(measured_s)) for endpoint, measured_s in known.items()}


def _cluster(
    fleet: inventory.Fleet,
    deployments: Sequence[Deployment],
    starts_s: float,
    trips_s: Mapping[tuple[str, str], float],
) -> tuple["Cluster", NDArray[np.float64]]:
    """As many instances as each deployment may have, those that are there ready; and their prices in USD an hour."""
    from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
    from scheduling.simulation.cluster.world import State
    from scheduling.simulation.engine.reference import EngineConfig

    specs: list[InstanceSpec] = []
    usd: list[float] = []
    routing: dict[tuple[str, str], str] = {}
    ordering: dict[tuple[str, str], str] = {}
    stretch: dict[tuple[str, str], float] = {}
    ahead: dict[tuple[str, str], int | None] = {}
    bounds: Counter[tuple[str, str]] = Counter()
    for place, row in fleet.deployments.items():
        profile = row.profile()
        if row not in deployments or profile is None:
            continue
        engine = EngineConfig(
            max_num_seqs=row.max_num_seqs,
            max_num_batched_tokens=max(row.max_num_batched_tokens, row.max_num_seqs),
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=max(1, row.expected_kv_tokens // BLOCK_TOKENS),
            policy=row.scheduling_policy,
            max_model_len=row.model.context_tokens,
            profile=profile.coefficients(),
        )
        ready = min(max(fleet.present[place], row.min_instances, 1), row.max_instances)
        model, region, gpu_type = place
        for number in range(row.max_instances):
            state = State.READY if number < ready else State.EMPTY
            specs.append(InstanceSpec(model, region, engine, gpu_type, f"{model}-{region}-{number + 1}", state))
            usd.append(float(row.gpu_type.on_demand_usd_per_hour) * row.tensor_parallel)
        routing.setdefault((model, region), row.routing_policy)
        ordering.setdefault((model, region), row.ordering_policy)
        stretch.setdefault((model, region), row.ordering_stretch)
        ahead.setdefault((model, region), row.requests_ahead_limit)
        bounds[model, region] += row.queue_bound
    # Live, an instance that is let go is stopped; it comes back as any other does.
    delays = Delays(spot_median_s=starts_s, spot_max_s=5 * starts_s, start_s=0.0, local_weights_s=starts_s)
    cluster = Cluster(
        specs,
        routing=routing,
        ordering=ordering,
        ordering_stretch=stretch,
        dispatch_round_trip_s={endpoint: trips_s.get(endpoint, 0.0) for endpoint in ahead},
        requests_ahead_limit=ahead,
        queue_bound=dict(bounds),
        delays=delays,
        share_spot=False,
    )
    return cluster, np.array(usd)


def _promise(row: SloClass) -> "Promise":
    from scheduling.simulation.measures.results import Promise

    def seconds(value: int | None) -> float:
        return np.inf if value is None else value / 1000

    deadline_s = np.inf if row.deadline_s is None else float(row.deadline_s)
    return Promise(seconds(row.ttft_target_ms), seconds(row.itl_target_ms), seconds(row.e2e_target_ms), deadline_s)


def due(now: datetime) -> bool:
    """Whether it is time for the next comparison."""
    if settings.COMPARE_EVERY_S <= 0:
        return False
    newest = StrategyComparison.objects.order_by("-pk").first()
    if newest is None:
        return True
    too_little = newest.note.startswith(TOO_LITTLE)
    every_s = min(AGAIN_S, settings.COMPARE_EVERY_S) if too_little else settings.COMPARE_EVERY_S
    return (now - newest.made_at).total_seconds() >= every_s
