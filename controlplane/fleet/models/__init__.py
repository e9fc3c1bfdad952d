"""The inventory: hardware with prices, models, deployments and instances."""

from controlplane.fleet.models.hardware import Device, GpuType, Node, Region, RegionLatency
from controlplane.fleet.models.instances import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from controlplane.fleet.models.rollouts import Rollout, RolloutState
from controlplane.fleet.models.serving import Deployment, Model, PerformanceProfile
from controlplane.fleet.models.slo import SloClass, SloKind
from controlplane.fleet.models.swaps import Swap, SwapGroup, SwapState, Tier

__all__ = [
    "CommandState",
    "CommandVerb",
    "Deployment",
    "Device",
    "GpuType",
    "Instance",
    "InstanceCommand",
    "Launcher",
    "Model",
    "Node",
    "PerformanceProfile",
    "Region",
    "RegionLatency",
    "Rollout",
    "RolloutState",
    "SloClass",
    "SloKind",
    "Swap",
    "SwapGroup",
    "SwapState",
    "Tier",
]
