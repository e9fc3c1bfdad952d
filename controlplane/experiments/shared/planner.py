"""The planner in an experiment: that of live plans, by forecasts made beforehand, for instances on machines of one type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.experiments.shared.demand import DemandForecasts, Seen
from scheduling.planning.advisor import Band, Demand, EndpointDemand, PlanSettings, SimulatedPlanner
from scheduling.planning.capacity import Capability
from scheduling.planning.places import Deployed, Endpoint, Fleet
from scheduling.scaling import EndpointView, PlansFor

MACHINE = "vm"


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand as plans know it: forecasts of the interactive tokens, and what lies behind them."""

    prompt: DemandForecasts
    output: DemandForecasts
    seen: Seen

    def demand(self, streams: Sequence[Endpoint], plans_for: PlansFor, now_s: float) -> Demand:
        """What the callers of *streams* are expected to ask for; they are the rows of the forecasts.

        Room is kept for all of the other work of the hour behind (beta), as live, since nothing holds that back.
        """
        now = self.prompt.at(now_s)

        def band(forecasts: DemandForecasts, at: int) -> Band:
            return Band(forecasts.mean[now, at], forecasts.upper_80[now, at])

        of = {
            stream: EndpointDemand.of(
                band(self.prompt, at),
                band(self.output, at),
                plans_for,
                self.seen.other_tokens_per_s(at, now_s),
                self.seen.arrival_cv(at, now_s),
            )
            for at, stream in enumerate(streams)
        }
        return Demand(now * self.prompt.window_s, self.prompt.window_s, of)


def planner(
    streams: Sequence[Endpoint],
    expected: Expected,
    plans_for: PlansFor,
    capability: Mapping[str, Capability],
    capacity: int,
    usd_per_hour: float,
) -> SimulatedPlanner:
    """The planner of a strategy that has plans made for *plans_for*, each at its period.

    Capability is by model, *capacity* the machines of a region, lent out or not.
    """
    return SimulatedPlanner(
        demand_at=lambda now_s: expected.demand(streams, plans_for, now_s),
        fleet_of=_fleet_of(dict.fromkeys(((region, MACHINE) for _, region in streams), capacity), usd_per_hour),
        capability={(model, MACHINE): one for model, one in capability.items()},
        follows=dict.fromkeys((model for model, _ in streams), plans_for),
        settings=PlanSettings(),
    )


def _fleet_of(units: Mapping[tuple[str, str], int], usd_per_hour: float) -> Callable[[Sequence[EndpointView]], Fleet]:
    def fleet_of(views: Sequence[EndpointView]) -> Fleet:
        deployments = {
            (view.model, view.region, MACHINE): Deployed(
                view.instances, view.spot, view.min_instances, view.max_instances, 1, usd_per_hour
            )
            for view in views
        }
        return Fleet(deployments, units)

    return fleet_of
