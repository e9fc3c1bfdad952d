"""A small fleet on a profile that can be worked out in the head."""

from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from tests.scheduling.simulation.engine.engines import config

ENGINE = config()


def instance(model: str = "m", region: str = "here", **more) -> InstanceSpec:
    return InstanceSpec(model, region, more.pop("engine", ENGINE), **more)


def cluster(*instances: InstanceSpec, **more) -> Cluster:
    """Knobs of the policy may be given among the options of the cluster."""
    knobs = {name: more.pop(name) for name in EndpointPolicy.__struct_fields__ if name in more}
    return Cluster(instances or [instance()], policies=more.pop("policies", EndpointPolicy(**knobs)), **more)
