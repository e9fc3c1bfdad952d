"""A whole scenario: its tables."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from scheduling.bundles import BUNDLES
from scheduling.model_task import Task
from scheduling.policy import EndpointPolicy
from scheduling.simulation.scenario.applications import ApplicationOf, BackendsOf
from scheduling.simulation.scenario.demand import BurstOf, ClientOf, DemandOf, PredictionsOf, TraceOf
from scheduling.simulation.scenario.fleet import Delays, Gpu, Group, ProfileOf, RegionOf, SwapGroupOf
from scheduling.simulation.scenario.parts import AtLeast0, Count, Positive, ScenarioTable
from scheduling.simulation.scenario.policies import EndpointOf, ModelOf, Policies, SloClassOf
from scheduling.simulation.scenario.scaling import CapabilityOf, ForecastOf, PlannerOf, ScalingOf, ScheduleOf
from scheduling.simulation.scenario.timed_events import FailureOf, RandomFailures, RedeployOf
from scheduling.simulation.scenario.toml_lines import Key

BUNDLED: Final = -1
"""Replaces a number of `[[endpoints]]` for values of a bundle."""
UNSCALED: Final = ScalingOf()
"""Without `[scaling]` or a bundle, nothing follows these."""


class Scenario(ScenarioTable):
    """Fleet, demand and policies of a simulation."""

    title: str = ""
    seed: Count = 0
    sample_s: AtLeast0 = 60.0
    """Step of the series of queues and use; 0 keeps none."""
    until_h: Positive | None = None
    """Stop then, whatever is still running."""
    begins_s: AtLeast0 = 0.0
    """Its start in seconds since 1970, for `[[schedules]]`."""
    models: Annotated[dict[str, ModelOf], Field(min_length=1)]
    gpus: Annotated[dict[str, Gpu], Field(min_length=1)]
    regions: Annotated[dict[str, RegionOf], Field(min_length=1)]
    latency_ms: dict[str, dict[str, AtLeast0]] = {}
    """One way, from region to region; the same in reverse unless that is given too."""
    profiles: Annotated[list[ProfileOf], Field(min_length=1)]
    fleet: Annotated[list[Group], Field(min_length=1)]
    swap_groups: dict[str, SwapGroupOf] = {}
    """Groups whose CPU memory is limited."""
    classes: Annotated[dict[str, SloClassOf], Field(min_length=1)]
    policies: Policies = Policies()
    endpoints: list[EndpointOf] = []
    scaling: ScalingOf | None = None
    schedules: list[ScheduleOf] = []
    planner: PlannerOf = PlannerOf()
    forecast: ForecastOf = ForecastOf()
    capabilities: list[CapabilityOf] = []
    predictions: PredictionsOf = PredictionsOf()
    failures: list[FailureOf] = []
    random_failures: RandomFailures | None = None
    redeploys: list[RedeployOf] = []
    delays: Delays = Delays()
    demand: DemandOf = DemandOf()
    weighted_targets: dict[str, Annotated[dict[str, AtLeast0], Field(min_length=1)]] = {}
    """Public names that clients and traces may ask for: the weight of each model that serves a share of them."""
    trace: TraceOf | None = None
    clients: list[ClientOf] = []
    applications: list[ApplicationOf] = []
    backends: dict[Literal["container", "dnn"], BackendsOf] = {}
    """Those that can be cold; units of a kind without a table find theirs warm."""
    bursts: list[BurstOf] = []

    @property
    def pooling(self) -> frozenset[str]:
        """Return the models whose requests have no output."""
        return frozenset(name for name, model in self.models.items() if model.task.pools)

    def task_of(self, name: str) -> Task:
        """Return the task of a model, or of the models that share a public name."""
        name = next(iter(self.weighted_targets.get(name, {})), name)
        return self.models[name].task if name in self.models else Task.GENERATE

    @property
    def names(self) -> list[str]:
        """Return what requests may ask for: models and public names."""
        return list(dict.fromkeys([*self.models, *self.weighted_targets]))

    @property
    def scaled(self) -> ScalingOf | None:
        """Return `[scaling]`, or its defaults if a bundle has a strategy; None if nothing scales."""
        bundled = self.policies.bundle or any(one.bundle for one in self.models.values())
        return self.scaling or (UNSCALED if bundled else None)

    def of_endpoint(self, model: str, region: str) -> list[tuple[int, EndpointOf]]:
        """Return the `[[endpoints]]` that apply to *model* in *region*, with their numbers; the last takes precedence.

        The first, with the number `BUNDLED`, has the values of the model's bundle.
        """
        numbered = [(BUNDLED, self._bundled(model)), *enumerate(self.endpoints)]
        return [(at, one) for at, one in numbered if one and one.model == model and one.region in (None, region)]

    def _bundled(self, model: str) -> EndpointOf | None:
        """Return the policies of the bundle of *model*; of that for all models, without keys that tables give."""
        own = self.models[model].bundle if model in self.models else None
        name = own or self.policies.bundle
        if name is None:
            return None
        bundle = BUNDLES[name]

        def left(table: ScenarioTable | None, **bundled: Any) -> dict[str, Any]:
            given = table.model_fields_set if table is not None and own is None else set()
            return {key: value for key, value in bundled.items() if key not in given}

        strategy = left(self.scaling, strategy=bundle.strategy)
        return EndpointOf(
            model=model,
            **left(self.policies, **bundle.policy, niw={"by": bundle.release}),
            **strategy,
            parameters=self._marks(model, bundle.strategy) | bundle.parameters if strategy else {},
            **left(self.forecast, forecaster=bundle.forecaster),
            **left(self.planner, demand_level=bundle.plan_demand, niw_share=bundle.niw_share),
        )

    def _marks(self, model: str, strategy: str) -> dict[str, Any]:
        return dict(self.models[model].marks.get(strategy, {})) if model in self.models else {}

    def at(self, model: str, region: str) -> Any:
        """Return every key of `[[endpoints]]` for *model* in *region*: of the last that gives it, else of all endpoints."""
        values: dict[str, Any] = {}
        for table in (self.scaled or UNSCALED, self.forecast, self.planner):
            values |= {name: value for name, value in table if name in EndpointOf.model_fields}
        for _, one in self.of_endpoint(model, region):
            values |= {name: value for name, value in one if value is not None}
        return EndpointOf.model_construct(**values)

    def policy(self, model: str, region: str) -> EndpointPolicy:
        """Return the policy of the endpoint of *model* in *region*."""
        given = self.at(model, region)
        own = {name: value for name in EndpointPolicy.__struct_fields__ if (value := getattr(given, name)) is not None}
        policy: EndpointPolicy = self.policies.model_copy(update=own).policy()
        return policy

    def strategy_of(self, model: str, region: str) -> tuple[Key, Any]:
        """Return the table that names the strategy of *model* in *region*, and its key, where anything scales."""
        for number, one in reversed(self.of_endpoint(model, region)):
            if one.strategy is not None:
                bundled = ("models", model, "bundle") if self.models[model].bundle else ("policies", "bundle")
                return (bundled if number == BUNDLED else ("endpoints", number, "strategy")), one
        return ("scaling", "strategy"), self.scaling
