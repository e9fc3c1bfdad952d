"""Strategies that scale a cluster in a simulation, without a scenario."""

from math import inf

from scheduling.scaling import FLOOR
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging.stage import SOURCE, Scaled, Stage
from scheduling.simulation.strategies import Bounds, Control

DEFAULT = Bounds()


def control_of(simulation: Simulation, strategy, bounds: Bounds = DEFAULT) -> Control:
    return Control(simulation, strategy, dict.fromkeys(simulation.cluster.endpoints, bounds))


def run_strategy(
    cluster,
    requests,
    strategy,
    *,
    bounds: Bounds = DEFAULT,
    floor=FLOOR,
    advisor=None,
    until_s: float = inf,
) -> Result:
    keys = cluster.endpoints
    floors = dict.fromkeys(keys, floor) if floor else None
    scaled = Scaled({}, dict.fromkeys(keys, strategy), dict.fromkeys(keys, bounds), floors)
    scenario = Scenario.model_construct(sample_s=0.0)
    return Stage(scenario, SOURCE, cluster, requests, [], 0, 0, scaled, (), 0, until_s).run(advisor=advisor)
