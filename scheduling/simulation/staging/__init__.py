"""From a scenario to a simulation that is ready to run."""

from scheduling.simulation.staging.stage import SOURCE, Stage, past_requests, stage

__all__ = ["SOURCE", "Stage", "past_requests", "stage"]
