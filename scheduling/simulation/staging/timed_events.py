"""Failures and redeploys of a scenario, as calls of the simulation."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.timed_events import FailureOf, RedeployOf
from scheduling.simulation.scenario.toml_lines import ScenarioProblem
from scheduling.simulation.simulator import OUT_OF_ORDER, Simulation, TimedEvent


def fail(instances: Sequence[int], repair_s: float | None, machines: bool, simulation: Simulation) -> None:
    """Let *instances* fail. With their *machines*, empty places fail too: nothing of a lost node or region serves until it
    is back.
    """
    for instance in instances:
        if machines:
            simulation.lose(instance, repair_s)
        elif simulation.states[instance] not in (State.EMPTY, *OUT_OF_ORDER):
            simulation.fail(instance, repair_s)


def redeploy(
    instances: Sequence[int], source: int, target: int, count: int, remote: bool, simulation: Simulation
) -> None:
    """Redeploy at most *count* of *instances* that are spot of the endpoint *source* to *target*."""
    lent = [at for at in instances if simulation.states[at] == State.SPOT and simulation.endpoint_of(at) == source]
    for instance in lent[:count]:
        simulation.redeploy(instance, target, remote)


def timed_events_of(scenario: Scenario, cluster: Cluster, seed: int, until_s: float) -> list[TimedEvent]:
    """Return the events in order of time; random ones up to *until_s*. Raise ScenarioProblem for unknown instances."""
    made = [
        TimedEvent(
            3600 * failure.at_h, partial(fail, _failing(cluster, number, failure), _seconds(failure.repair_min), True)
        )
        for number, failure in enumerate(scenario.failures)
    ]
    if (random := scenario.random_failures) is not None:
        repair_s = _seconds(random.repair_min)
        for instance in range(len(cluster.instances)):
            draw, at_s = np.random.default_rng([seed, 11, instance]), 0.0
            while (at_s := at_s + float(draw.exponential(3600 * random.mtbf_h))) < until_s:
                made.append(TimedEvent(at_s, partial(fail, [instance], repair_s, False)))
    for number, each in enumerate(scenario.redeploys):
        made.append(TimedEvent(3600 * each.at_h, _redeploy(cluster, number, each)))
    return sorted(made, key=lambda each: each.at_s)


def lost_at(scenario: Scenario, cluster: Cluster, now_s: float) -> set[int]:
    """Return the instances, empty places included, whose machines are lost at *now_s*."""
    lost = set()
    for number, failure in enumerate(scenario.failures):
        repair_s = _seconds(failure.repair_min)
        lasts_s = cluster.delays.repair_s if repair_s is None else repair_s
        if 3600 * failure.at_h <= now_s < 3600 * failure.at_h + lasts_s:
            lost.update(_failing(cluster, number, failure))
    return lost


def _failing(cluster: Cluster, number: int, failure: FailureOf) -> list[int]:
    named = [
        at
        for at, spec in enumerate(cluster.instances)
        if spec.name == failure.instance or (spec.region == failure.region and failure.model in (None, spec.model))
    ]
    if not named:
        if failure.instance is None:
            raise ScenarioProblem(("failures", number, "region"), f"there is no such instance in {failure.region}")
        names = ", ".join(spec.name for spec in cluster.instances)
        raise ScenarioProblem(
            ("failures", number, "instance"), f"there is no instance {failure.instance!r}; there is {names}"
        )
    return named


def _redeploy(cluster: Cluster, number: int, given: RedeployOf) -> Callable[[Simulation], None]:
    models = given.from_model, given.to_model
    source, target = (cluster.endpoints.index((model, given.region)) for model in models)
    able = {gpu_type for model, gpu_type in cluster.engines() if model == given.to_model}
    fit = [at for at, spec in enumerate(cluster.instances) if spec.region == given.region and spec.gpu_type in able]
    if not any(cluster.instances[at].model == given.from_model for at in fit):
        what = f"no instance of {given.from_model} in {given.region} has GPUs for {given.to_model}"
        raise ScenarioProblem(("redeploys", number, "to_model"), f"{what}: it runs on {', '.join(sorted(able))}")
    return partial(redeploy, fit, source, target, given.count, given.remote)


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes
