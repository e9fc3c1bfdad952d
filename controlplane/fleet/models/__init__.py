"""The inventory: hardware with prices, models, deployments and instances."""

from controlplane.fleet.models.hardware import Device, GpuType, Region
from controlplane.fleet.models.instances import (
    CommandState,
    CommandVerb,
    Gpu,
    Instance,
    InstanceCommand,
    Launcher,
    Node,
    Stock,
    StockState,
)
from controlplane.fleet.models.maintenance import Maintenance, MaintenanceState
from controlplane.fleet.models.owner import Owner
from controlplane.fleet.models.prices import Price, PriceOf, Prices
from controlplane.fleet.models.rollouts import Rollout, RolloutState
from controlplane.fleet.models.schedules import ScheduledMinimum
from controlplane.fleet.models.serving import Adapter, Deployment, Model, ModelTask, PerformanceProfile, WeightedTarget
from controlplane.fleet.models.slo import OnReclaim, SloClass, SloKind
from controlplane.fleet.models.spot import Donation, DonationState
from controlplane.fleet.models.swaps import Swap, SwapGroup, SwapState, Tier

__all__ = [
    "Adapter",
    "CommandState",
    "CommandVerb",
    "Deployment",
    "Device",
    "Donation",
    "DonationState",
    "Gpu",
    "GpuType",
    "Instance",
    "InstanceCommand",
    "Launcher",
    "Maintenance",
    "MaintenanceState",
    "Model",
    "ModelTask",
    "Node",
    "OnReclaim",
    "Owner",
    "PerformanceProfile",
    "Price",
    "PriceOf",
    "Prices",
    "Region",
    "Rollout",
    "RolloutState",
    "ScheduledMinimum",
    "SloClass",
    "SloKind",
    "Stock",
    "StockState",
    "Swap",
    "SwapGroup",
    "SwapState",
    "Tier",
    "WeightedTarget",
]
