"""From a scenario to a simulation that is ready to run."""

from scheduling.simulation.staging.stage import Stage, stage

__all__ = ["Stage", "stage"]
