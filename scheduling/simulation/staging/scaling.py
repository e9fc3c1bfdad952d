"""How a scenario's endpoints are scaled: their strategies, as one, and their bounds."""

from dataclasses import dataclass
from typing import Any

from scheduling.scaling import Assigned, ByEndpoint, Floor, Unified, make_strategy
from scheduling.simulation.cluster.description import Cluster, EndpointKey
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.policies import EndpointOf
from scheduling.simulation.scenario.scaling import ScalingOf
from scheduling.simulation.scenario.scenario import BUNDLED
from scheduling.simulation.scenario.toml_lines import Key, ScenarioProblem
from scheduling.simulation.strategies import Bounds


@dataclass(frozen=True, slots=True)
class Scaled:
    """Arguments of `run_strategy`."""

    settings: dict[EndpointKey, Any]
    """`Scenario.at` each endpoint."""
    strategies: dict[EndpointKey, ByEndpoint]
    bounds: dict[EndpointKey, Bounds]
    floor: dict[EndpointKey, Floor] | None
    per_arrival: bool = False

    @property
    def one(self) -> ByEndpoint | Assigned:
        """Return all as one strategy. Reactive alone, with equal bounds, decides on every arrival, as in the paper."""
        first, *others = {id(each): each for each in self.strategies.values()}.values()
        if others or (isinstance(first, Unified) and len(set(self.bounds.values())) > 1):
            return Assigned(self.strategies)
        return first


def scaled_of(scenario: Scenario, cluster: Cluster) -> Scaled | None:
    """Return strategies and bounds; None without scaling. Raise ScenarioProblem if a model's regions follow two."""
    scaling = scenario.scaled
    if scaling is None:
        return None
    made: dict[Key, ByEndpoint] = {}
    settings = {key: scenario.at(*key) for key in cluster.endpoints}
    bounds = {key: Bounds(own.min_instances, own.max_instances) for key, own in settings.items()}
    floors = {key: Floor(own.floor_above, own.floor_cooldown_s) for key, own in settings.items()}
    strategies: dict[EndpointKey, ByEndpoint] = {}
    followed: dict[str, str] = {}
    for key in cluster.endpoints:
        where, follows = _strategy_of(scenario, key)
        strategy = strategies[key] = made.setdefault(where, make_strategy(follows.strategy or "", follows.parameters))
        if strategy.uses_advice and followed.setdefault(key[0], strategy.name) != strategy.name:
            what = f"{key[0]} follows plans for {followed[key[0]]} in another region: its regions are planned together"
            raise ScenarioProblem(where, what)
    return Scaled(settings, strategies, bounds, floors if scaling.floor else None, scaling.per_arrival)


def _strategy_of(scenario: Scenario, endpoint: EndpointKey) -> tuple[Key, ScalingOf | EndpointOf]:
    """Return the table that names the strategy of *endpoint*, and its key."""
    model, _ = endpoint
    for number, one in reversed(scenario.of_endpoint(*endpoint)):
        if one.strategy is not None:
            bundled = ("models", model, "bundle") if scenario.models[model].bundle else ("policies", "bundle")
            return (bundled if number == BUNDLED else ("endpoints", number, "strategy")), one
    assert scenario.scaling is not None  # or it would be a loose end
    return ("scaling", "strategy"), scenario.scaling
