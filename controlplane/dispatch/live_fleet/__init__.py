"""The live fleet: inventory, instances and endpoints, heartbeats, health."""
