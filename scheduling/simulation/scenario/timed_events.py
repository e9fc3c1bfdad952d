"""Tables of a scenario for events at its instances: failures, and manual redeploys."""

from typing import Self

from pydantic import model_validator

from scheduling.simulation.scenario.parts import AtLeast0, Positive, ScenarioTable, Size


class FailureOf(ScenarioTable):
    """One instance, or all of a region, fail at a time."""

    at_h: AtLeast0
    instance: str | None = None
    """The instance's name, such as `llama-us-east-1`: model, region, and its number in the group."""
    region: str | None = None
    model: str | None = None
    """Only the region's instances of this model."""
    repair_min: AtLeast0 | None = None
    """Until its weights begin to load again; default: that of the delays."""

    @model_validator(mode="after")
    def _which(self) -> Self:
        if (self.instance is None) == (self.region is None):
            raise ValueError("give instance or region, and not both")
        if self.model is not None and self.region is None:
            raise ValueError("model narrows a region: give region")
        return self


class RandomFailures(ScenarioTable):
    """Failures of every instance at random times, with a mean number of hours between two."""

    mtbf_h: Positive
    repair_min: AtLeast0 | None = None


class RedeployOf(ScenarioTable):
    """Spot instances of one model in a region are redeployed for another model there."""

    at_h: AtLeast0
    region: str
    from_model: str
    to_model: str
    count: Size = 1
    """At most as many as are lent out then."""
    remote: bool = False
    """Whether its weights come from another region."""
