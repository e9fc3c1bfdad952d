"""Scenario files: TOML that says which fleet serves which demand under which policies. Keys: docs/simulation.md.

A wrong file is refused with the file, the line and the key; `scheduling.simulation.staging` makes a right one ready to run.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator, model_validator

from scheduling.queueing.ordering import ORDERINGS, STRETCH
from scheduling.routing.routers import POLICY_CODES
from scheduling.simulation.toml_lines import Key, ScenarioError, wrong_at
from scheduling.simulation.workload.traces import FORMATS

Positive = Annotated[FiniteFloat, Field(gt=0)]
AtLeast0 = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Size = Annotated[int, Field(ge=1)]


__all__ = ["Scenario", "ScenarioError", "load_scenario"]


class Part(BaseModel):
    """A table of the file: no key that it does not know, no number written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Gpu(Part):
    """Prices of one GPU for an hour."""

    usd_per_hour: AtLeast0 = 0.0
    spot_usd_per_hour: AtLeast0 = 0.0


class Prefill(Part):
    t0_s: AtLeast0 = 0.0
    a_s: FiniteFloat
    b_s_per_token: AtLeast0
    c_s_per_token2: AtLeast0 = 0.0


class Decode(Part):
    a_s: Positive
    b_s_per_sequence: AtLeast0 = 0.0
    c_s_per_token: AtLeast0 = 0.0


class ProfileOf(Part):
    """Coefficients of a model on a GPU type at a tensor parallel degree."""

    model: str
    gpu: str
    tensor_parallel: Size = 1
    prefill: Prefill
    decode: Decode


class ModelOf(Part):
    context_tokens: Size
    """Prompt and output together."""


class RegionOf(Part):
    peak_shift_h: FiniteFloat = 0.0
    """How much later than the clients' `peak_h` its day peaks."""


class Group(Part):
    """Equal instances of a model, in each of some regions."""

    model: str
    regions: Annotated[list[str], Field(min_length=1)]
    gpu: str
    tensor_parallel: Size = 1
    instances: Count
    """Ready at the start, in each region."""
    spot: Count = 0
    """Lent out at the start, with this model loaded."""
    empty: Count = 0
    """Places for further instances."""
    kv_tokens: Size
    """KV cache of an instance."""
    max_num_seqs: Size = 256
    max_num_batched_tokens: Size = 8192
    block_size_tokens: Size = 16
    queue: Literal["fcfs", "priority"] = "fcfs"
    """vLLM's own waiting order."""
    prefix_caching: bool = False

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.instances + self.spot + self.empty:
            raise ValueError("instances, spot and empty are all 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs, or running requests would starve")
        if self.kv_tokens < self.block_size_tokens:
            raise ValueError("kv_tokens must be at least block_size_tokens")
        return self


class SloClassOf(Part):
    ttft_ms: Positive | None = None
    itl_ms: Positive | None = None
    e2e_ms: Positive | None = None
    deadline_s: Positive | None = None
    priority: int = 0
    """Lower is earlier."""


class BatchingOf(Part):
    mode: Literal["continuous", "none", "dynamic"] = "continuous"
    max_batch_size: Count = 0
    wait_timeout_s: AtLeast0 = 0.0


class ReactiveOf(Part):
    out_above: Positive = 0.7
    in_below: AtLeast0 = 0.3
    cooldown_s: AtLeast0 = 15.0
    min_instances: Count = 2
    max_instances: Count = 20

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_instances > self.max_instances:
            raise ValueError(f"min_instances ({self.min_instances}) is above max_instances ({self.max_instances})")
        if self.in_below >= self.out_above:
            raise ValueError(f"in_below ({self.in_below}) must be below out_above ({self.out_above})")
        return self


class Policies(Part):
    routing: str = "join_shortest_queue"
    ordering: str = "fcfs"
    ordering_stretch: AtLeast0 = STRETCH
    dispatch_round_trip_ms: AtLeast0 = 0.0
    requests_ahead_limit: Count | None = None
    region_threshold: AtLeast0 = 0.7
    queue_bound: Size | None = None
    batching: BatchingOf = BatchingOf()
    reactive: ReactiveOf | None = None

    @field_validator("routing")
    @classmethod
    def _known_routing(cls, value: str) -> str:
        return _one_of(value, POLICY_CODES)

    @field_validator("ordering")
    @classmethod
    def _known_ordering(cls, value: str) -> str:
        return _one_of(value, ORDERINGS)


class TraceOf(Part):
    """A recorded trace; what it does not say is set here."""

    file: str
    """Relative to the scenario's own folder."""
    format: str
    limit: Size | None = None
    speed: Positive = 1.0
    model: str | None = None
    """For requests whose model the trace does not name; the scenario's only model if it has one."""
    models: dict[str, str] = {}
    """Model of the scenario for each name in the trace."""
    region: str | None = None
    slo_class: str | None = None
    tenant: str = "trace"

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        return _one_of(value, FORMATS)


class LengthsOf(Part):
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


class LengthsTrace(Part):
    """Lengths drawn from a trace."""

    file: str
    format: str

    @field_validator("format")
    @classmethod
    def _known(cls, value: str) -> str:
        return _one_of(value, FORMATS)


class ClientOf(Part):
    """One tenant's stream of requests; see `scheduling.simulation.workload.generator.Client`."""

    tenant: str
    model: str
    slo_class: str
    requests_per_s: Positive
    regions: dict[str, AtLeast0] = {}
    """Shares; all of the scenario's regions alike if it is left out."""
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
        if self.lengths is None and (self.prompt is None or self.output is None):
            raise ValueError("give prompt and output, or lengths from a trace")
        if self.lengths is not None and (self.prompt is not None or self.output is not None):
            raise ValueError("prompt and output, or lengths from a trace: not both")
        return self


class BurstOf(Part):
    start_h: AtLeast0
    duration_min: Positive
    factor: AtLeast0 = 8.0
    models: list[str] = []


class RandomBursts(Part):
    count: Count
    duration_min: Positive
    factor: AtLeast0 = 8.0
    models: list[str] = []


class Demand(Part):
    """Synthetic demand as a whole, and what is done with lengths."""

    duration_h: Positive | None = None
    too_long: Literal["refuse", "clip", "drop"] = "refuse"
    """What happens to requests longer than their model's context."""
    prediction_error: AtLeast0 = 0.0
    """Standard deviation of the logarithm of predicted over true output; 0 is an oracle."""
    random_bursts: RandomBursts | None = None


class Scenario(Part):
    """A whole file."""

    title: str = ""
    seed: Count = 0
    sample_s: AtLeast0 = 60.0
    """Step of the series of queues and use; 0 keeps none."""
    until_h: Positive | None = None
    """Stop then, whatever still runs."""
    models: Annotated[dict[str, ModelOf], Field(min_length=1)]
    gpus: Annotated[dict[str, Gpu], Field(min_length=1)]
    regions: Annotated[dict[str, RegionOf], Field(min_length=1)]
    latency_ms: dict[str, dict[str, AtLeast0]] = {}
    """One way, from region to region; the same back unless that is given too."""
    profiles: Annotated[list[ProfileOf], Field(min_length=1)]
    fleet: Annotated[list[Group], Field(min_length=1)]
    classes: Annotated[dict[str, SloClassOf], Field(min_length=1)]
    policies: Policies = Policies()
    delays: dict[str, FiniteFloat | int] = {}
    """Fields of `scheduling.simulation.cluster.description.Delays`."""
    demand: Demand = Demand()
    trace: TraceOf | None = None
    clients: list[ClientOf] = []
    bursts: list[BurstOf] = []


def load_scenario(path: Path) -> Scenario:
    """The scenario at *path*. Raises ScenarioError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(path, 0, "", getattr(error, "strerror", None) or str(error)) from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
        line, what = (int(position[1]), str(error).replace(position[0], "")) if position else (0, str(error))
        raise ScenarioError(path, line, "", f"is not TOML: {what}") from error
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise wrong_at(path, text, _location(first["loc"], values), _words(first)) from error
    for key, what in _loose_ends(scenario):
        raise wrong_at(path, text, key, what)
    return scenario


def _loose_ends(scenario: Scenario) -> list[tuple[Key, str]]:
    """Names that nothing stands behind, and other contradictions between tables: (key, what is wrong)."""
    wrong: list[tuple[Key, str]] = []

    def known(key: Key, name: str, names: Any, kind: str) -> None:
        if name not in names:
            wrong.append((key, f"there is no {kind} {name!r}; there is {', '.join(names)}"))

    for number, profile in enumerate(scenario.profiles):
        known(("profiles", number, "model"), profile.model, scenario.models, "model")
        known(("profiles", number, "gpu"), profile.gpu, scenario.gpus, "GPU")
    profiles = {(profile.model, profile.gpu, profile.tensor_parallel) for profile in scenario.profiles}
    if len(profiles) < len(scenario.profiles):
        wrong.append((("profiles",), "two profiles are for one model, GPU and tensor_parallel"))
    for number, group in enumerate(scenario.fleet):
        known(("fleet", number, "model"), group.model, scenario.models, "model")
        known(("fleet", number, "gpu"), group.gpu, scenario.gpus, "GPU")
        for region in group.regions:
            known(("fleet", number, "regions"), region, scenario.regions, "region")
        if (group.model, group.gpu, group.tensor_parallel) not in profiles:
            setting = f"{group.model} on {group.tensor_parallel} x {group.gpu}"
            wrong.append((("fleet", number, "gpu"), f"there is no profile of {setting}"))
    served = {group.model for group in scenario.fleet}
    for origin, targets in scenario.latency_ms.items():
        known(("latency_ms", origin), origin, scenario.regions, "region")
        for target in targets:
            known(("latency_ms", origin, target), target, scenario.regions, "region")
    for number, client in enumerate(scenario.clients):
        known(("clients", number, "slo_class"), client.slo_class, scenario.classes, "class")
        known(("clients", number, "model"), client.model, scenario.models, "model")
        if client.model in scenario.models and client.model not in served:
            wrong.append((("clients", number, "model"), f"no instance of the fleet serves {client.model}"))
        for region in client.regions:
            known(("clients", number, "regions"), region, scenario.regions, "region")
        if client.regions and not any(client.regions.values()):
            wrong.append((("clients", number, "regions"), "all shares are 0"))
    for number, burst in enumerate(scenario.bursts):
        for model in burst.models:
            known(("bursts", number, "models"), model, scenario.models, "model")
    if scenario.trace is None and not scenario.clients:
        wrong.append(((), "there is no demand: give [trace] or [[clients]]"))
    if scenario.trace is not None and scenario.clients:
        wrong.append((("trace",), "give [trace] or [[clients]], not both"))
    if scenario.clients and scenario.demand.duration_h is None:
        wrong.append((("demand",), "duration_h is missing: how long the clients send"))
    if (trace := scenario.trace) is not None:
        for name, kind, names in (
            ("model", "model", scenario.models),
            ("region", "region", scenario.regions),
            ("slo_class", "class", scenario.classes),
        ):
            value = getattr(trace, name)
            if value is not None:
                known(("trace", name), value, names, kind)
        for theirs, ours in trace.models.items():
            known(("trace", "models", theirs), ours, scenario.models, "model")
    return wrong


def _one_of(value: str, names: Any) -> str:
    if value not in names:
        raise ValueError(f"must be one of {', '.join(names)}, not {value!r}")
    return value


def _location(location: tuple[int | str, ...], values: Any) -> Key:
    """*location* without what pydantic adds for unions: only steps that the file has, and a last one that it lacks."""
    key: list[str | int] = []
    for step in location:
        if isinstance(values, dict) and step not in values:
            key.append(step)
            break
        if not isinstance(values, dict | list):
            break
        key.append(step)
        values = values[step]  # type: ignore[index,unused-ignore]
    return tuple(key)


def _words(error: Any) -> str:
    kind, message = error["type"], str(error["msg"])
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not a key of a scenario"
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    value = error["input"]
    return message if isinstance(value, dict | list) or f"not {value!r}" in message else f"{message}, not {value!r}"
