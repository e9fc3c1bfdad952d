"""Tables of a scenario for its demand: a trace, or clients with their lengths and bursts."""

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, field_validator, model_validator

from scheduling.simulation.scenario.parts import AtLeast0, Count, Positive, ScenarioTable, Size, one_of
from scheduling.simulation.workload.traces import FORMATS


class TraceOf(ScenarioTable):
    """A recorded trace; values that it lacks are set here."""

    file: str
    """Relative to the scenario's own folder."""
    format: str
    unit: Literal["", "ms", "s"] = ""
    """Of times in `mooncake`'s format that are numbers; default: ms, where they cannot be seconds."""
    limit: Size | None = None
    speed: Positive = 1.0
    model: str | None = None
    """For requests whose model the trace does not name; default: the scenario's only model."""
    models: dict[str, str] = {}
    """Model of the scenario for each name in the trace."""
    region: str | None = None
    slo_class: str | None = None
    tenant: str = "trace"

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        return one_of(value, FORMATS)


class LengthsOf(ScenarioTable):
    """A lognormal distribution of tokens."""

    median: Positive
    p95: Positive
    minimum: Size = 1
    maximum: Size = 32_768

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.median > self.p95:
            raise ValueError(f"median ({self.median}) is above p95 ({self.p95})")
        if self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) is above maximum ({self.maximum})")
        return self


class LengthsTrace(ScenarioTable):
    """Lengths drawn from a trace."""

    file: str
    format: str
    unit: Literal["", "ms", "s"] = ""

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        return one_of(value, FORMATS)


class ClientOf(ScenarioTable):
    """One tenant's stream of requests; see `scheduling.simulation.workload.generator.Client`."""

    tenant: str
    model: str
    slo_class: str
    requests_per_s: Positive
    regions: dict[str, AtLeast0] = {}
    """Shares; default: equal for all of the scenario's regions."""
    gaps: Literal["gamma", "weibull"] = "gamma"
    cv: Annotated[FiniteFloat, Field(gt=0, le=20)] = 1.0
    daily_swing: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.0
    peak_h: FiniteFloat = 14.0
    weekend: AtLeast0 = 1.0
    prompt: LengthsOf | None = None
    output: LengthsOf | None = None
    lengths: LengthsTrace | None = None

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        if self.lengths is None and self.prompt is None:
            raise ValueError("give prompt and output, or lengths from a trace")
        if self.lengths is not None and (self.prompt is not None or self.output is not None):
            raise ValueError("prompt and output, or lengths from a trace: not both")
        return self

    @property
    def has_lengths(self) -> bool:
        """Whether prompts and outputs are given, as a model that generates needs."""
        return self.lengths is not None or self.output is not None


class BurstOf(ScenarioTable):
    start_h: AtLeast0
    duration_min: Positive
    factor: AtLeast0 = 8.0
    models: list[str] = []


class RandomBursts(ScenarioTable):
    count: Count
    duration_min: Positive
    factor: AtLeast0 = 8.0
    models: list[str] = []


class DemandOf(ScenarioTable):
    """Synthetic demand as a whole, and the handling of lengths."""

    duration_h: Positive | None = None
    too_long: Literal["refuse", "clip", "drop"] = "refuse"
    """Handling of requests longer than their model's context."""
    random_bursts: RandomBursts | None = None


class PredictionsOf(ScenarioTable):
    """Knowledge of output lengths in the dispatcher."""

    kind: Literal["exact", "error", "none"] = "exact"
    """`exact`: the true ones. `error`: those times an error drawn for each. `none`: the mean of its model."""
    log_sd: AtLeast0 = 0.0
    """Standard deviation of the logarithm of predicted over true."""
    bias: Positive = 1.0
    """Median of predicted over true."""
    runs: Literal["graph", "unrefined", "whole", "exact", "none"] = "graph"
    """Knowledge of application runs. `graph`: demand graphs of other runs of each application. `unrefined`: those without
    correlations. `whole`: the distribution of whole runs alone, whatever a run has done so far. `exact`: the true service.
    `none`: what open calls are predicted to need.
    """
    recorded_runs: Size = 200
    """Runs of each application that its demand graph is learned from."""
    buckets: Size = 10
    """Of a run's service, for its Gittins rank."""
    worst: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Quantile of a run's path to its end that the order `run_slack` takes as its worst case; 1 is the longest one drawn."""

    @model_validator(mode="after")
    def _of_kind(self) -> Self:
        if self.kind != "error" and (self.log_sd, self.bias) != (0.0, 1.0):
            raise ValueError(f"log_sd and bias are those of kind error, not of {self.kind}")
        return self
