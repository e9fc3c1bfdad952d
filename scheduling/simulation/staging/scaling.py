"""How a scenario's endpoints are scaled: their strategies, as one, and their bounds."""

from dataclasses import dataclass

from scheduling.scaling import Assigned, ByEndpoint, Floor, Unified, make_strategy
from scheduling.simulation.cluster.description import Cluster, EndpointKey
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.misfit import Misfit
from scheduling.simulation.strategies import Bounds


@dataclass(frozen=True, slots=True)
class Scaled:
    """What `run_strategy` is given."""

    strategies: dict[EndpointKey, ByEndpoint]
    bounds: dict[EndpointKey, Bounds]
    floor: Floor | None

    @property
    def one(self) -> ByEndpoint | Assigned:
        """All as one strategy. Reactive decides on every arrival, as in the paper, where it is alone with equal bounds."""
        first, *others = {id(each): each for each in self.strategies.values()}.values()
        if others or (isinstance(first, Unified) and len(set(self.bounds.values())) > 1):
            return Assigned(self.strategies)
        return first


def scaled_of(scenario: Scenario, cluster: Cluster) -> Scaled | None:
    """None where nothing scales. Raises Misfit where one model's regions would follow different plans."""
    scaling = scenario.scaling
    if scaling is None:
        return None
    shared = make_strategy(scaling.strategy, scaling.parameters)
    named = {
        number: make_strategy(each.strategy, each.parameters)
        for number, each in enumerate(scenario.endpoints)
        if each.strategy is not None
    }
    strategies, bounds = {}, {}
    followed: dict[str, str] = {}
    for key in cluster.endpoints:
        given = scenario.of_endpoint(*key)
        number = next((at for at, _ in reversed(given) if at in named), None)
        strategy = strategies[key] = shared if number is None else named[number]
        if strategy.uses_advice and followed.setdefault(key[0], strategy.name) != strategy.name:
            where = ("scaling", "strategy") if number is None else ("endpoints", number, "strategy")
            what = f"{key[0]} follows plans for {followed[key[0]]} in another region: its regions are planned together"
            raise Misfit(where, what)
        least = [one.min_instances for _, one in given if one.min_instances is not None]
        most = [one.max_instances for _, one in given if one.max_instances is not None]
        bounds[key] = Bounds([scaling.min_instances, *least][-1], [scaling.max_instances, *most][-1])
    floor = Floor(scaling.floor_above, scaling.floor_cooldown_s) if scaling.floor else None
    return Scaled(strategies, bounds, floor)
