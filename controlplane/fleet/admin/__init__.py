"""Admin of the inventory, which Django finds by importing this package."""

from controlplane.fleet.admin import hardware, instances, serving

__all__ = ["hardware", "instances", "serving"]
