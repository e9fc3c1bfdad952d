"""From a scenario to a simulation: the fleet and its policies as a cluster, the demand as requests."""

from dataclasses import dataclass
from pathlib import Path

from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.measures.results import Names, Price, Promise
from scheduling.simulation.scenario import Scenario, wrong_at
from scheduling.simulation.staging.demand import demand_of
from scheduling.simulation.staging.fleet import cluster_of, prices_of
from scheduling.simulation.staging.misfit import Misfit
from scheduling.simulation.staging.requests import promise_of, requests_of
from scheduling.simulation.workload.requests import Requests


@dataclass(frozen=True, slots=True)
class Stage:
    """All that a simulation of a scenario takes, and what its measures are named by."""

    cluster: Cluster
    requests: Requests
    names: Names
    promises: tuple[Promise, ...]
    prices: dict[str, Price]
    left_out: int
    """Requests of the trace that are not simulated: without a prompt or an output, or too long and dropped."""
    clipped: int
    """Requests shortened to their model's context."""


def stage(scenario: Scenario, path: Path, seed: int | None = None) -> Stage:
    """Make *scenario*, read from *path*, ready to run with *seed* (its own if None).

    Raises ScenarioError, and TraceError when a trace cannot be read.
    """
    try:
        return _staged(scenario, path.parent, scenario.seed if seed is None else seed)
    except Misfit as misfit:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        raise wrong_at(path, text, misfit.key, str(misfit)) from misfit


def _staged(scenario: Scenario, folder: Path, seed: int) -> Stage:
    cluster = cluster_of(scenario)
    workload, clipped = demand_of(scenario, folder, seed)
    return Stage(
        cluster=cluster,
        requests=requests_of(scenario, cluster, workload, seed),
        names=Names(cluster.models, cluster.regions, list(scenario.classes), workload.tenant.names),
        promises=tuple(promise_of(one) for one in scenario.classes.values()),
        prices=prices_of(scenario),
        left_out=workload.left_out,
        clipped=clipped,
    )
