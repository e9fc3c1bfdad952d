"""The inventory: where hardware is, what it costs, which models there are, and which instances serve them."""

from controlplane.fleet.models.hardware import GpuType, Node, Region
from controlplane.fleet.models.instances import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from controlplane.fleet.models.serving import Deployment, Model, OrderingPolicy, PerformanceProfile, RoutingPolicy
from controlplane.fleet.models.slo import SloClass, SloKind

__all__ = [
    "CommandState",
    "CommandVerb",
    "Deployment",
    "GpuType",
    "Instance",
    "InstanceCommand",
    "Launcher",
    "Model",
    "Node",
    "OrderingPolicy",
    "PerformanceProfile",
    "Region",
    "RoutingPolicy",
    "SloClass",
    "SloKind",
]
