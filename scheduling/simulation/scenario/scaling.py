"""Tables of a scenario for instance counts: strategies, plans, and the plans' inputs."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from scheduling.scaling import make_strategy
from scheduling.scaling.schedule import WEEKDAYS, Rule
from scheduling.simulation.scenario.parts import AtLeast0, Count, Positive, ScenarioTable, Size, one_of
from scheduling.simulation.scenario.policies import DemandLevel, Parameters

Share = Annotated[FiniteFloat, Field(ge=0, le=1)]


class ScalingOf(ScenarioTable):
    """Strategy of all endpoints without another one in `[[endpoints]]`, over the reactive floor."""

    strategy: str | None = None
    """None if every model uses its bundle's."""
    parameters: Parameters = {}
    """Of the strategy; see docs/papers/scaling.md."""
    min_instances: Count = 2
    max_instances: Count = 20
    floor: bool = True
    floor_above: Positive = 1.0
    floor_cooldown_s: AtLeast0 = 15.0
    per_arrival: bool = False
    """Whether the reactive strategies decide on every arrival, without patience or a floor, as in the paper."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.strategy is not None:
            make_strategy(self.strategy, self.parameters)
        elif self.parameters:
            raise ValueError("parameters are those of a strategy: name it")
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances ({self.min_instances}) is above max_instances ({self.max_instances})")
        return self


Weekday = Annotated[str, AfterValidator(lambda name: one_of(name, WEEKDAYS))]


class ScheduleOf(ScenarioTable):
    """At least so many ready instances of a model on these weekdays between two times of a zone's clock."""

    model: str
    region: str | None = None
    """None: in each of its regions."""
    instances: Size
    weekdays: list[Weekday] = []
    """On which it begins; empty: every day."""
    begins: str
    ends: str
    """Before or at `begins`: of the next day."""
    time_zone: str = "UTC"
    except_on: list[str] = []

    @property
    def rule(self) -> Rule:
        """Raise ValueError for what is no time, zone or day."""
        return Rule.read(self.instances, self.begins, self.ends, self.weekdays, self.time_zone, self.except_on)

    @model_validator(mode="after")
    def _readable(self) -> Self:
        assert self.rule
        return self


class PlannerOf(ScenarioTable):
    """Computation of the plans that strategies follow."""

    period_s: Positive | None = None
    """Time between plans; default: each strategy's."""
    horizon_s: Positive = 3600.0
    """Horizon of a plan, in whole windows of the forecast."""
    demand_level: DemandLevel = "strategy"
    """Forecast level to plan for: the strategy's, the mean, or the upper end of its 80 % band."""
    niw_share: AtLeast0 = 1.0
    """Share of deferred work that plans have room for: what arrives and waits, at the least constant rate that keeps its
    deadlines. SageServe's beta is a tenth."""
    epsilon: Annotated[FiniteFloat, Field(gt=0, le=1)] = 0.8
    """Share of local demand that a region must be able to serve."""
    time_limit_s: Positive = 20.0
    capability_instances: Annotated[int, Field(ge=1, le=64)] = 8
    """Size of the largest fleet simulated to measure capability, where `[[capabilities]]` gives none."""
    capability_most_above: Annotated[FiniteFloat, Field(ge=1)] = 1.1
    """Limit of the planned throughput per instance in larger fleets, as a multiple of the highest in the simulated ones."""


class ForecastOf(ScenarioTable):
    """Forecast of demand for plans."""

    forecaster: str = ""
    """`oracle`: the actual demand; `recent`: the highest minute of ten; a forecaster's name; empty: the best."""
    window_s: Annotated[int, Field(ge=60, multiple_of=60)] = 600
    history_days: Annotated[FiniteFloat, Field(ge=0, le=28)] = 0.0
    """Of the clients' demand before the start, drawn for the forecaster to learn from."""
    refit_h: Positive = 24.0
    """Time between refits of a forecaster."""


class CapabilityOf(ScenarioTable):
    """Throughput of an instance, in tokens per second; a missing rate is unlimited."""

    model: str
    gpu: str
    tensor_parallel: Size = 1
    prompt_tokens_per_s: Positive | None = None
    output_tokens_per_s: Positive | None = None
    total_tokens_per_s: Positive
    """Prompt and output together."""
