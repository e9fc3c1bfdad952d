"""The slow planners of a simulation: forecasts turned into instances by the ILP or by Algorithm 2."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.experiments.shared.demand import DemandForecasts, Windows
from scheduling.planning.capacity import Capability, instances_needed
from scheduling.planning.planner import solve
from scheduling.planning.problem import Problem, StartCosts
from scheduling.scaling import Advice, EndpointView

Floats = NDArray[np.float64]
HOUR_S = 3600.0


@dataclass(slots=True)
class IlpAdvisor:
    """SageServe's planner (sections 5 and 6.4): every *every_s*, the ILP over models and regions.

    Demand is the interactive forecast, by its mean or by *quantile* towards the upper end of the 80 % band; beta is
    *niw_share* of the other work of the hour behind. Endpoints are (model, region), models by models.
    """

    models: Sequence[str]
    regions: Sequence[str]
    forecasts: DemandForecasts
    other_work: Windows
    capability_tokens_per_s: Floats
    """By model: what an instance serves within its promises."""
    capacity: int
    """Instances that a region has machines for, lent out or not."""
    usd_per_hour: float
    every_s: float = HOUR_S
    look_s: float = HOUR_S
    """How far the plan looks."""
    later_s: float = 0.0
    """How far the second plan looks, whose instances are not to be let go; 0 for none."""
    upper: float = 0.0
    """0: the mean is planned for; 1: the upper end of the 80 % band."""
    later_upper: float = 0.0
    """The same for the second plan."""
    epsilon: float = 0.8
    niw_share: float = 1.0
    fill: float = 1.0
    """Share of the capability that is planned with."""
    _cost: StartCosts = field(init=False)

    def __post_init__(self) -> None:
        self._cost = StartCosts.paid_while_starting([self.usd_per_hour], HOUR_S, len(self.models))

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> list[Advice | None]:
        step = self.forecasts.at(now_s)
        windows = max(1, round(self.look_s / self.forecasts.window_s))
        demand = self._demand(step, windows, self.upper)
        niw = self._other(now_s)
        targets = self._solve(demand, niw, views)
        soon = None
        if self.later_s > self.look_s:
            longer = self._demand(step, round(self.later_s / self.forecasts.window_s), self.later_upper)
            soon, targets = targets, np.maximum(targets, self._solve(longer, niw, views))
        expected = demand.max(axis=1) + niw
        return [
            Advice(
                int(targets[at]),
                float(expected[at]),
                now_s,
                now_s + self.every_s,
                None if soon is None else int(soon[at]),
            )
            for at in range(len(views))
        ]

    def _demand(self, step: int, windows: int, towards_upper: float) -> Floats:
        mean, upper = self.forecasts.mean[step], self.forecasts.upper_80[step]
        between: Floats = mean + towards_upper * (upper - mean)
        return between[:, :windows]

    def _other(self, now_s: float) -> Floats:
        """Rate of the other work over the hour behind, by endpoint."""
        total = self.other_work.total
        until = int(now_s // self.other_work.window_s)
        hour = max(1, round(HOUR_S / self.other_work.window_s))
        seen = total[:, max(0, until - hour) : until]
        rate: Floats = seen.mean(axis=1) if seen.shape[1] else total[:, :1].mean(axis=1)
        return rate

    def _solve(self, demand: Floats, niw: Floats, views: Sequence[EndpointView]) -> NDArray[np.int64]:
        shape = (len(self.models), len(self.regions))

        def table(name: str) -> NDArray[np.int64]:
            return np.array([getattr(view, name) for view in views]).reshape(shape)

        plan = solve(
            Problem(
                models=tuple(self.models),
                regions=tuple(self.regions),
                gpu_types=("vm",),
                instances=table("instances")[:, :, None],
                capability_tokens_per_s=(self.capability_tokens_per_s * self.fill)[:, None],
                demand_tokens_per_s=demand.reshape(*shape, -1),
                vm_cost_usd=np.array([self.usd_per_hour]),
                start_cost_usd=self._cost,
                min_instances=table("min_instances"),
                max_instances=table("max_instances"),
                capacity=np.full((shape[1], 1), self.capacity),
                spot=table("spot")[:, :, None],
                epsilon=np.array(self.epsilon),
                buffer_tokens_per_s=self.niw_share * niw.reshape(shape),
            )
        )
        return np.asarray(table("instances") + plan.delta[:, :, 0]).reshape(-1)


@dataclass(slots=True)
class CapabilityAdvisor:
    """PreServe's planner (Algorithm 2): at the begin of a window, the instances that the next one asks for.

    N is the largest of three ratios: prompt, output and all tokens by what an instance was seen to serve of each.
    """

    prompt: DemandForecasts
    output: DemandForecasts
    capability: Capability
    every_s: float = 600.0

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> list[Advice | None]:
        step = self.prompt.at(now_s)
        # At the begin of window i, what is known ends with i - 1: the first of a forecast is i, the second i + 1.
        prompt, output = self.prompt.mean[step, :, 1], self.output.mean[step, :, 1]
        return [
            Advice(
                instances_needed(self.capability, float(prompt[at]), float(output[at])),
                float(prompt[at] + output[at]),
                now_s,
                now_s + self.every_s,
            )
            for at in range(len(views))
        ]
