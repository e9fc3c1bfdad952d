"""What the gateway knows of the fleet: instances and endpoints, their heartbeats, round trips and look-ahead maps."""
