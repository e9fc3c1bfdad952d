"""The start of a simulation with a fleet that runs."""
