"""A small fleet on a profile that can be worked out in the head."""

from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from tests.scheduling.simulation.engine.engines import config

ENGINE = config()


def instance(model: str = "m", region: str = "here", **more) -> InstanceSpec:
    return InstanceSpec(model, region, more.pop("engine", ENGINE), **more)


def cluster(*instances: InstanceSpec, **more) -> Cluster:
    return Cluster(instances or [instance()], **more)
