"""Tables of a scenario for the dispatch of requests, and the promises to callers."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, FiniteFloat, create_model, model_validator

from scheduling.applications.prewarming import USUAL_SHARE, PrewarmBy
from scheduling.knob import Declared, Policy, knobs, nested
from scheduling.model_task import Task
from scheduling.policy import EndpointPolicy
from scheduling.queueing.reordering.rules import REORDERINGS, SEARCH
from scheduling.scaling import make_strategy
from scheduling.simulation.scenario.parts import AtLeast0, BundleName, Count, Positive, ScenarioTable, Size, one_of

Reordering = Annotated[str, AfterValidator(lambda name: one_of(name, REORDERINGS))]
Parameters = dict[str, FiniteFloat | int]
DemandLevel = Literal["strategy", "mean", "upper_80"]


class PolicyTable(ScenarioTable):
    """A table whose keys are the knobs of `struct`."""

    struct: ClassVar[type[Policy]]

    def policy(self) -> Any:
        """Return the `struct` that the table describes. Raise ValueError."""
        values = {name: getattr(self, name) for name in self.struct.__struct_fields__}
        tables = {name: value.policy() for name, value in values.items() if isinstance(value, PolicyTable)}
        return self.struct(**values | tables)

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        self.policy()
        return self


def _key(declared: Declared, partial: bool) -> tuple[Any, Any]:
    def check(value: Any) -> Any:
        problem = "" if partial and value is None else declared.problem(value)
        if problem:
            raise ValueError(problem)
        return value

    optional = partial or declared.optional
    kind = declared.type | None if optional else declared.type
    return Annotated[kind, AfterValidator(check)], None if partial else declared.default


def _table(struct: type[Policy]) -> type[PolicyTable]:
    keys: dict[str, Any] = {name: _key(each, partial=False) for name, each in knobs(struct).items()}
    for name, inner in nested(struct).items():
        table = _table(inner)
        keys[name] = table, table.model_construct()
    made = create_model(struct.__name__, __base__=PolicyTable, **keys)
    made.struct = struct
    return made


def _partial(table: type[PolicyTable]) -> type[ScenarioTable]:
    """Return *table* with every key optional."""
    keys: dict[str, Any] = {name: _key(each, partial=True) for name, each in knobs(table.struct).items()}
    for name in nested(table.struct):
        inner: Any = table.model_fields[name].annotation
        keys[name] = inner | None, None
    return create_model(f"Partial{table.__name__}", __base__=ScenarioTable, **keys)


if TYPE_CHECKING:
    PolicyKeys = PolicyTable
    PolicyOverrides = ScenarioTable
else:
    PolicyKeys = _table(EndpointPolicy)
    PolicyOverrides = _partial(PolicyKeys)


class SloClassOf(ScenarioTable):
    kind: Literal["interactive", "non_interactive", "opportunistic"] = "interactive"
    """Plans forecast the interactive classes, have room for the non-interactive ones, and ignore the last."""
    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    e2e_ms: Positive | None = None
    percentile: Annotated[float, Field(gt=0, le=100)] = 95.0
    """Percentage of requests for which plans keep these promises."""
    deadline_s: Positive | None = None
    priority: int = 0
    """Lower is earlier."""
    if_unreachable: Literal["admit", "degrade", "refuse"] = "admit"
    """What happens to a request whose estimated wait (99th percentile) is too long for its promise."""
    degrades_to: str | None = None
    """Class that takes such requests, where they are degraded."""
    on_reclaim: Literal["requeue", "end"] = "requeue"
    """What becomes of a request of an opportunistic class when the donated instance that serves it is reclaimed."""

    @model_validator(mode="after")
    def _degrades(self) -> Self:
        if self.on_reclaim == "end" and self.kind != "opportunistic":
            raise ValueError("on_reclaim is of opportunistic classes: no other request runs on a donated instance")
        if (self.if_unreachable == "degrade") != (self.degrades_to is not None):
            raise ValueError("give degrades_to with if_unreachable = 'degrade', and only then")
        return self


class EndpointOf(PolicyOverrides):
    """Policies of one model, in one region or all, that differ from those of all endpoints. Later ones take precedence."""

    model: str
    region: str | None = None
    strategy: str | None = None
    parameters: Parameters = {}
    """Of `strategy`."""
    min_instances: Count | None = None
    max_instances: Count | None = None
    floor_above: Positive | None = None
    floor_cooldown_s: AtLeast0 | None = None
    forecaster: str | None = None
    demand_level: DemandLevel | None = None
    niw_share: AtLeast0 | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.strategy is not None:
            make_strategy(self.strategy, self.parameters)
        elif self.parameters:
            raise ValueError("parameters are those of a strategy: name it")
        return self


class AdaptersOf(ScenarioTable):
    """LoRA adapters of a model, drawn for its requests."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]
    share: Annotated[FiniteFloat, Field(gt=0, le=1)] = 1.0
    """Share of the model's requests that use one."""
    zipf: AtLeast0 = 0.0
    """Exponent of their popularity: the n-th is asked for in proportion to 1 / n to this power; 0: all alike."""


class ModelOf(ScenarioTable):
    context_tokens: Size
    """Prompt and output together."""
    adapters: AdaptersOf | None = None
    """None: its requests use no adapter."""
    fallback: str | None = None
    """Model that serves its requests where it does not (`routing.models`)."""
    fallback_wait_s: AtLeast0 | None = None
    """The fallback also serves a request that would wait longer; None: however long it waits."""
    task: Annotated[Task, Field(strict=False)] = Task.GENERATE
    """By vLLM's names. Requests to a model with any other task end with their prefill, and have no output."""
    bundle: BundleName | None = None
    """All its policies at once; `[[endpoints]]` takes precedence."""
    marks: dict[str, Parameters] = {}
    """By strategy, parameters for this model where a bundle has that strategy: settings of a live fleet."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for strategy, parameters in self.marks.items():
            make_strategy(strategy, parameters)
        if self.fallback_wait_s is not None and self.fallback is None:
            raise ValueError("fallback_wait_s is given without a fallback")
        return self


class Policies(PolicyKeys):
    """Policies of all endpoints."""

    bundle: BundleName | None = None
    """Default for models without a bundle; keys given here, in `[scaling]`, `[planner]` or `[forecast]` take precedence."""
    reordering: Reordering = SEARCH
    """Of `qlm`: the global scheduler's search, or a simple rule instead."""
    prewarming: PrewarmBy = "hermes"
    """How backends are prewarmed (`applications.prewarming`)."""
    late_runs_last: bool = False
    """Whether `run_deadline` and `run_slack` serve runs that can no longer be in time after all others."""
    prewarm_k: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.5
    """Least effectiveness of prewarming for an application run (Hermes' K)."""
    prewarm_share: Annotated[FiniteFloat, Field(ge=0, le=1)] = USUAL_SHARE
    """Most of an instance's time that computing system prompts early may take (`control.system_prompts`)."""
    sweeps: bool = True
    """Whether waiting requests are swept every second: moved to a better endpoint, refused after `max_hold_s`."""
    share_spot: bool = True
    """Whether a machine that one model has released may be redeployed for another of its GPU type (SageServe's spot)."""
    max_hold_s: AtLeast0 = 600.0
    """Maximum wait of a request for an instance with room, if its class has no deadline."""
