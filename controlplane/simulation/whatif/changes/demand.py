"""Changes of demand and SLOs: volume, timing and lengths of requests, a new tenant, SLO targets."""

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from controlplane.fleet.models.hardware import region_title
from controlplane.simulation.whatif.changes.base import (
    Change,
    ChangeError,
    Values,
    clock,
    known,
    models_words,
)
from scheduling.simulation.scenario.applications import MIXED, ApplicationOf
from scheduling.simulation.scenario.demand import ClientOf
from scheduling.simulation.staging.demand import client_of
from scheduling.simulation.workload.edits import Edit, Factor, LengthFactor, More, Scope, Shift
from scheduling.simulation.workload.generator import generate

AtLeast0 = Annotated[FiniteFloat, Field(ge=0)]
NEW_TENANT_SEED = 7_000_003
"""Added to the seed for another tenant's requests."""


class DemandChange(Change):
    """More or less demand (`factor`, or `burst` with an end), shifted (`shift`), longer or shorter (`lengths`).

    Filtered by *models*, *regions* and *classes*; empty means all. A factor ramps up and down over `ramp_s`.
    """

    kind: Literal["demand"] = "demand"
    edit: Literal["factor", "burst", "shift", "lengths"]
    by: Annotated[FiniteFloat, Field(ge=0, le=100)] = 1.0
    prompt: Annotated[FiniteFloat, Field(gt=0, le=100)] = 1.0
    output: Annotated[FiniteFloat, Field(gt=0, le=100)] = 1.0
    shift_s: FiniteFloat = 0.0
    from_s: AtLeast0 = 0.0
    until_s: AtLeast0 | None = None
    ramp_s: AtLeast0 = 0.0
    models: list[str] = []
    regions: list[str] = []
    classes: list[str] = []

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.edit == "burst" and self.until_s is None:
            raise ValueError("until_s is missing: when the burst ends")
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"until_s ({self.until_s:g}) is not after from_s ({self.from_s:g})")
        return self

    def apply(self, values: Values) -> None:
        for field, given, there in (
            ("models", self.models, values["models"]),
            ("regions", self.regions, values["regions"]),
            ("classes", self.classes, values["classes"]),
        ):
            for name in given:
                known(field, name, there, field.removesuffix("es") if field == "classes" else field[:-1])

    def edits(self, values: Values, seed: int, horizon_s: float) -> list[Edit]:
        scope = Scope(frozenset(self.models), frozenset(self.regions), frozenset(self.classes))
        until_s = horizon_s if self.until_s is None else self.until_s
        match self.edit:
            case "shift":
                return [Shift(scope, self.shift_s)]
            case "lengths":
                return [LengthFactor(scope, self.prompt, self.output)]
            case _:
                return [Factor(scope, self.by, self.from_s, until_s, self.ramp_s)]

    def words(self, before: Values) -> str:
        whose = [region_title(name) for name in self.regions]
        if self.models:
            whose.insert(0, models_words(self.models, before))
        whose += self.classes
        of = f" of {', '.join(whose)}" if whose else ""
        when = ""
        if self.until_s is not None:
            when = f" from {clock(self.from_s)} to {clock(self.until_s)}"
        elif self.from_s:
            when = f" from {clock(self.from_s)} on"
        match self.edit:
            case "shift":
                return f"demand{of} {clock(abs(self.shift_s))} {'later' if self.shift_s > 0 else 'earlier'}"
            case "lengths":
                return f"prompts {self.prompt:g}x and outputs {self.output:g}x as long{of and f',{of}'}"
            case _:
                ramp = f", ramp {clock(self.ramp_s)}" if self.ramp_s else ""
                return f"{self.by:g}x demand{of}{when}{ramp}"


class TenantChange(Change):
    """Another tenant or application that sends requests like a scenario's client."""

    kind: Literal["tenant"] = "tenant"
    client: ClientOf
    from_s: AtLeast0 = 0.0
    until_s: AtLeast0 | None = None

    def apply(self, values: Values) -> None:
        client = self.client
        known("client.model", client.model, values["models"], "model")
        known("client.slo_class", client.slo_class, values["classes"], "class")
        for region in client.regions:
            known("client.regions", region, values["regions"], "region")
        if client.lengths is not None:
            raise ChangeError("client.lengths", "is read from a file: give prompt and output")

    def edits(self, values: Values, seed: int, horizon_s: float) -> list[Edit]:
        until_s = min(horizon_s, horizon_s if self.until_s is None else self.until_s)
        shifts_h = {name: region.get("peak_shift_h", 0.0) for name, region in values["regions"].items()}
        made = generate(
            [client_of(self.client, list(values["regions"]))], until_s, shifts_h=shifts_h, seed=seed + NEW_TENANT_SEED
        )
        return [More(made.select(made.arrival_s >= self.from_s))]

    def words(self, before: Values) -> str:
        client = self.client
        return (
            f"new tenant {client.tenant}: {client.requests_per_s:g} requests/s of {client.slo_class} to {client.model}"
        )


class ApplicationChange(Change):
    """Runs of an application of the suite, or of its mix, as a table `[[applications]]` of a scenario."""

    kind: Literal["application"] = "application"
    application: ApplicationOf

    def apply(self, values: Values) -> None:
        application = self.application
        known("application.model", application.model, values["models"], "model")
        known("application.slo_class", application.slo_class, values["classes"], "class")
        for region in application.regions:
            known("application.regions", region, values["regions"], "region")
        if isinstance(application.graph, str) or application.arrivals is not None:
            raise ChangeError("application", "reads a file: give a suite, or the graph itself, and gaps of cv")
        table = application.model_dump(mode="json", exclude_defaults=True)
        values["applications"] = [*values.get("applications", []), table]

    def words(self, before: Values) -> str:
        table = self.application
        what = table.name or table.suite or "a graph"
        runs = f"{table.runs} runs" if table.runs is not None else f"{table.runs_per_h:g} runs an hour"
        return f"{runs} of {'the application mix' if what == MIXED else what} on {table.model}"


class SloChange(Change):
    """New targets of a class; omitted ones stay."""

    kind: Literal["slo"] = "slo"
    slo_class: str
    ttft_ms: Annotated[FiniteFloat, Field(gt=0)] | None = None
    itl_ms: Annotated[FiniteFloat, Field(gt=0)] | None = None
    e2e_ms: Annotated[FiniteFloat, Field(gt=0)] | None = None
    deadline_s: Annotated[FiniteFloat, Field(gt=0)] | None = None

    def _given(self) -> dict[str, float]:
        return self.model_dump(include={"ttft_ms", "itl_ms", "e2e_ms", "deadline_s"}, exclude_none=True)

    def apply(self, values: Values) -> None:
        known("slo_class", self.slo_class, values["classes"], "class")
        if not self._given():
            raise ChangeError("ttft_ms", "is missing, and so are the other targets: nothing changes")
        values["classes"][self.slo_class] = values["classes"][self.slo_class] | self._given()

    def words(self, before: Values) -> str:
        now = before["classes"].get(self.slo_class, {})
        units = {
            "ttft_ms": ("TTFT", "ms"),
            "itl_ms": ("ITL", "ms"),
            "e2e_ms": ("E2E", "ms"),
            "deadline_s": ("deadline", "s"),
        }
        words = []
        for name, value in self._given().items():
            title, unit = units[name]
            was = "none" if now.get(name) is None else f"{now[name]:g}"
            words.append(f"{title} {was} to {value:g} {unit}")
        return f"{self.slo_class} {', '.join(words)}"
