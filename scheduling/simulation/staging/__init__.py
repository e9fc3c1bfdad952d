"""From a scenario to a simulation that is ready to run."""

from scheduling.simulation.staging.stage import Stage, past_requests, stage

__all__ = ["Stage", "past_requests", "stage"]
