"""The requests of a simulation, from traces or synthetic."""
