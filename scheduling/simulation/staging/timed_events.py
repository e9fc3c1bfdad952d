"""Failures and redeploys of a scenario, as calls of the simulation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.timed_events import FailureOf, RedeployOf
from scheduling.simulation.simulator import OUT_OF_ORDER, Simulation, TimedEvent
from scheduling.simulation.staging.problem import ScenarioProblem


@dataclass(frozen=True, slots=True)
class Fail:
    """*instances* fail. With their *machines*, empty places fail too: nothing of a lost node or region
    serves until it is back."""

    instances: Sequence[int]
    repair_s: float | None
    machines: bool = True

    def __call__(self, simulation: Simulation) -> None:
        for instance in self.instances:
            if self.machines:
                simulation.lose(instance, self.repair_s)
            elif simulation.states[instance] not in (State.EMPTY, *OUT_OF_ORDER):
                simulation.fail(instance, self.repair_s)


@dataclass(frozen=True, slots=True)
class Redeploy:
    """At most *count* of *instances* that are spot of the endpoint *source* are redeployed to *target*."""

    instances: Sequence[int]
    source: int
    target: int
    count: int
    remote: bool

    def __call__(self, simulation: Simulation) -> None:
        lent = [
            instance
            for instance in self.instances
            if simulation.states[instance] == State.SPOT and simulation.endpoint_of(instance) == self.source
        ]
        for instance in lent[: self.count]:
            simulation.redeploy(instance, self.target, self.remote)


def timed_events_of(scenario: Scenario, cluster: Cluster, seed: int, until_s: float) -> list[TimedEvent]:
    """Return the events in order of time; random ones up to *until_s*. Raise ScenarioProblem for unknown instances."""
    made = [
        TimedEvent(3600 * failure.at_h, Fail(_failing(cluster, number, failure), _seconds(failure.repair_min)))
        for number, failure in enumerate(scenario.failures)
    ]
    if (random := scenario.random_failures) is not None:
        repair_s = _seconds(random.repair_min)
        for instance in range(len(cluster.instances)):
            draw, at_s = np.random.default_rng([seed, 11, instance]), 0.0
            while (at_s := at_s + float(draw.exponential(3600 * random.mtbf_h))) < until_s:
                made.append(TimedEvent(at_s, Fail([instance], repair_s, machines=False)))
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


def _redeploy(cluster: Cluster, number: int, redeploy: RedeployOf) -> Redeploy:
    models = redeploy.from_model, redeploy.to_model
    source, target = (cluster.endpoints.index((model, redeploy.region)) for model in models)
    able = {gpu_type for model, gpu_type in cluster.engines() if model == redeploy.to_model}
    fit = [at for at, spec in enumerate(cluster.instances) if spec.region == redeploy.region and spec.gpu_type in able]
    if not any(cluster.instances[at].model == redeploy.from_model for at in fit):
        what = f"no instance of {redeploy.from_model} in {redeploy.region} has GPUs for {redeploy.to_model}"
        raise ScenarioProblem(("redeploys", number, "to_model"), f"{what}: it runs on {', '.join(sorted(able))}")
    return Redeploy(fit, source, target, redeploy.count, redeploy.remote)


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes
