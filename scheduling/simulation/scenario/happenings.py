"""Tables of a scenario that say what happens to its instances: failures, and redeploys by hand."""

from typing import Self

from pydantic import model_validator

from scheduling.simulation.scenario.parts import AtLeast0, Part, Positive, Size


class FailureOf(Part):
    """One instance, or all of a region, fail at a time."""

    at_h: AtLeast0
    instance: str | None = None
    """Its name, such as `llama-us-east-1`: model, region, and its number in the group."""
    region: str | None = None
    model: str | None = None
    """Of the region's instances, those of this model only."""
    repair_min: AtLeast0 | None = None
    """Until its weights begin to load again; that of the delays if left out."""

    @model_validator(mode="after")
    def _which(self) -> Self:
        if (self.instance is None) == (self.region is None):
            raise ValueError("give instance or region, and not both")
        if self.model is not None and self.region is None:
            raise ValueError("model narrows a region: give region")
        return self


class RandomFailures(Part):
    """Every instance fails at random moments, with so many hours between two on average."""

    mtbf_h: Positive
    repair_min: AtLeast0 | None = None


class RedeployOf(Part):
    """Instances that one model has lent out as spot in a region are given to another model there."""

    at_h: AtLeast0
    region: str
    from_model: str
    to_model: str
    count: Size = 1
    """As many as are lent out then, at the most."""
    remote: bool = False
    """Whether its weights come from another region."""
