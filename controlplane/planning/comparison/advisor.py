"""Plans inside a simulation of the last hours, made as they are live and by what was known then."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from controlplane.planning.forecasts import demand
from controlplane.planning.models import Forecast, Quantity
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans.expected import RECENT, Expected, expected_at, fresh_for
from controlplane.planning.plans.round import Round

if TYPE_CHECKING:
    from scheduling.scaling import Advice, EndpointView

RECENT_MINUTES = int(RECENT.total_seconds()) // demand.MINUTE_S


class _Plan(NamedTuple):
    made_at_s: float
    start_s: float
    """Begin of the first window."""
    of: dict[str, tuple[int, list[float], list[float]]]
    """By endpoint: instances, tokens a second of the windows planned for, and of those to add for."""


class Advisor:
    """The planner of a simulation: same problem, same solver, forecasts of that time."""

    def __init__(self, fleet: inventory.Fleet, from_at: datetime, to_at: datetime, strategy: str = "") -> None:
        """*from_at* to *to_at* is simulated; *strategy* is who follows the plans."""
        self.every_s = float(min(settings.PLAN_EVERY_S, settings.FORECAST_WINDOW_S))
        self._fleet, self._from_at, self._strategy = fleet, from_at, strategy
        self._plan: _Plan | None = None
        self._capability = capability.read(fleet, to_at)
        self._counted = demand.read(from_at - RECENT - timedelta(minutes=1), to_at, demand.MINUTE_S)
        self._horizon = timedelta(seconds=settings.FORECAST_WINDOW_S * settings.FORECAST_WINDOWS)
        rows = Forecast.objects.filter(slo_class="", made_at__gte=from_at - fresh_for(), made_at__lt=to_at)
        self._within_s = fresh_for().total_seconds()
        self._forecasts: dict[tuple[str, str, str], tuple[list[float], list[Forecast]]] = {}
        for row in rows.order_by("made_at"):
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
            target, windows, windows_soon = plan.of[view.key]
            soon = soon_of(target, windows, window_s, now_s - plan.start_s, windows_soon)
            until_s = plan.made_at_s + settings.PLAN_EVERY_S
            peak = max(windows, default=0.0)
            advice.append(Advice(target, peak, plan.made_at_s, until_s, soon))
        return advice

    def _solve(self, now_s: float, views: Sequence["EndpointView"]) -> _Plan:
        at = self._from_at + timedelta(seconds=now_s)
        expected = self._expected(at, [(view.model, view.region) for view in views])
        fleet = replace(self._fleet, present=self._present(views), spare=Counter())
        solved = Round.solved(fleet, expected, self._capability, self._horizon)
        problem, targets = solved.planned.problem, solved.plan.targets
        of = {}
        for view in views:
            endpoint = (view.model, view.region)
            i, j = problem.models.index(view.model), problem.regions.index(view.region)
            windows, soon = expected.tokens_per_s[endpoint], expected.soon_tokens_per_s[endpoint]
            of[view.key] = int(targets[i, j].sum()), windows.tolist(), soon.tolist()
        return _Plan(now_s, (expected.start - self._from_at).total_seconds(), of)

    def _expected(self, at: datetime, endpoints: Sequence[demand.Endpoint]) -> Expected:
        """Demand of the windows to come, as known *at* that time."""
        at_s = at.timestamp()
        until = int((at - self._counted.start).total_seconds() // demand.MINUTE_S)

        def forecast_of(endpoint: demand.Endpoint, quantity: Quantity) -> Forecast | None:
            times, rows = self._forecasts.get((*endpoint, quantity), ([], []))
            number = bisect_right(times, at_s) - 1
            return rows[number] if number >= 0 and at_s - times[number] <= self._within_s else None

        def recent_of(endpoint: demand.Endpoint, quantity: Quantity) -> NDArray[np.float64]:
            return self._counted.of(endpoint, quantity)[max(0, until - RECENT_MINUTES) : until]

        return expected_at(at, dict.fromkeys(endpoints, self._strategy), forecast_of, recent_of)

    def _present(self, views: Sequence["EndpointView"]) -> Counter[inventory.Place]:
        """Instances of each view, on the endpoint's deployments in their order."""
        present: Counter[inventory.Place] = Counter()
        left = {(view.model, view.region): view.instances for view in views}
        for (model, region, gpu_type), row in self._fleet.deployments.items():
            count = min(left.get((model, region), 0), row.max_instances)
            present[model, region, gpu_type] = count
            left[model, region] = left.get((model, region), 0) - count
        return present
