"""Routers of the fleet: the inventory, what is deployed, instances and what operators do to them, models that swap."""
