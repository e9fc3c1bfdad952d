"""Changes of supply: GPUs and their prices, bounds, and failures."""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from controlplane.fleet.models.hardware import region_title
from controlplane.simulation.whatif.changes.base import Change, ChangeError, Values, clock, known

AtLeast0 = Annotated[FiniteFloat, Field(ge=0)]
Count = Annotated[int, Field(ge=0, le=100_000)]


class GpuChange(Change):
    """*count* GPUs of a type in *region*, for instances of *models* (empty: all that run on them there).

    Counted as installed in nodes, where known. More GPUs add empty places, dealt to the models one by one, and raise
    their bounds equally. Fewer remove empty places first, then ready instances, until the rest fit.
    """

    kind: Literal["gpus"] = "gpus"
    region: str
    gpu: str
    count: Count
    models: list[str] = []

    def apply(self, values: Values) -> None:
        known("region", self.region, values["regions"], "region")
        known("gpu", self.gpu, values["gpus"], "GPU")
        for model in self.models:
            known("models", model, values["models"], "model")
        groups = [
            group
            for group in _own_groups(values, self.region)
            if group["gpu"] == self.gpu and (not self.models or group["model"] in self.models)
        ]
        if not groups:
            raise ChangeError("gpu", f"no model runs on {self.gpu} in {self.region}")
        more = self.count - gpus_in(values, self.region, self.gpu)
        if more < 0:
            more = min(0, self.count - _placed(values, self.region, self.gpu))
        groups.sort(key=lambda group: -_places(group))
        added: dict[str, int] = {}
        while more:
            moved = False
            for group in groups:
                size = group.get("tensor_parallel", 1)
                if more >= size:
                    group["empty"] = group.get("empty", 0) + 1
                    added[group["model"]] = added.get(group["model"], 0) + 1
                    more, moved = more - size, True
                elif more <= -size and (name := _least_used(group)):
                    group[name] -= 1
                    more, moved = more + size, True
            if not moved:
                break
        values["fleet"] = [group for group in values["fleet"] if _places(group)]
        for model, count in added.items():
            _raise_bound(values, model, self.region, count)
        if counts := values["gpus"][self.gpu].get("count"):
            values["gpus"][self.gpu]["count"] = {**counts, self.region: self.count}

    def words(self, before: Values) -> str:
        now = gpus_in(before, self.region, self.gpu)
        whose = f", for {', '.join(self.models)}" if self.models else ""
        return f"{self.gpu} {now} to {self.count} in {region_title(self.region)}{whose}"


class FleetChange(Change):
    """Another fleet for its models: tables of a scenario, of as many instances as it has; other models keep theirs."""

    kind: Literal["fleet"] = "fleet"
    title: str
    fleet: list[Values]
    profiles: list[Values]
    gpus: dict[str, Values]

    def apply(self, values: Values) -> None:
        models = {group["model"] for group in self.fleet}
        for name in models:
            known("fleet", name, values["models"], "model")
        values["fleet"] = [group for group in values["fleet"] if group["model"] not in models] + self.fleet
        left = {group["sharing"]["group"] for group in values["fleet"] if group.get("sharing")}
        values["swap_groups"] = {name: of for name, of in values.get("swap_groups", {}).items() if name in left}
        settings = {(one["model"], one["gpu"], one.get("tensor_parallel", 1)) for one in self.profiles}
        values["profiles"] = self.profiles + [
            one
            for one in values["profiles"]
            if (one["model"], one["gpu"], one.get("tensor_parallel", 1)) not in settings
        ]
        values["gpus"] = self.gpus | values["gpus"]
        counts: Counter[tuple[str, str]] = Counter()
        for group in values["fleet"]:
            counts.update({(group["model"], region): _places(group) for region in group["regions"]})
        values["endpoints"] = [one for one in values["endpoints"] if counts[one["model"], one["region"]]]
        if values.get("scaling") is not None:
            values["endpoints"] += [
                {"model": model, "region": region, "min_instances": count, "max_instances": count}
                for (model, region), count in counts.items()
                if model in models
            ]

    def words(self, before: Values) -> str:
        count = sum(group["instances"] * group.get("tensor_parallel", 1) for group in self.fleet)
        return f"the fleet of {self.title[:1].lower()}{self.title[1:]}: {count} GPUs"


class PriceChange(Change):
    """Hourly price of one GPU in dollars; an omitted spot price stays."""

    kind: Literal["price"] = "price"
    gpu: str
    usd_per_hour: AtLeast0
    spot_usd_per_hour: AtLeast0 | None = None

    def apply(self, values: Values) -> None:
        prices = values["gpus"][known("gpu", self.gpu, values["gpus"], "GPU")]
        prices["usd_per_hour"] = self.usd_per_hour
        if self.spot_usd_per_hour is not None:
            prices["spot_usd_per_hour"] = self.spot_usd_per_hour

    def words(self, before: Values) -> str:
        now = before["gpus"].get(self.gpu, {})
        was, was_spot = (now.get(name, 0.0) for name in ("usd_per_hour", "spot_usd_per_hour"))
        parts = [f"${was:.2f} to ${self.usd_per_hour:.2f} an hour"]
        if self.spot_usd_per_hour is not None:
            spot = f"spot ${was_spot:.2f} to ${self.spot_usd_per_hour:.2f}"
            parts = [*parts, spot] if self.usd_per_hour != was else [f"{spot} an hour"]
        return f"{self.gpu} {', '.join(parts)}"


class BoundsChange(Change):
    """Minimum and maximum instances of *model*, in *region* or in each; omitted values stay."""

    kind: Literal["bounds"] = "bounds"
    model: str
    region: str = ""
    min_instances: Count | None = None
    max_instances: Count | None = None

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.min_instances is None and self.max_instances is None:
            raise ValueError("give min_instances, max_instances or both")
        return self

    def apply(self, values: Values) -> None:
        known("model", self.model, values["models"], "model")
        if self.region:
            known("region", self.region, values["regions"], "region")
        if values.get("scaling") is None and not any(each.get("bundle") for each in values["models"].values()):
            raise ChangeError("model", f"nothing scales {self.model}: give it a strategy first")
        for region in [self.region] if self.region else list(values["regions"]):
            own = [group for group in _own_groups(values, region) if group["model"] == self.model]
            if not own:
                continue
            least, most = bounds_of(values, self.model, region)
            least = least if self.min_instances is None else self.min_instances
            most = most if self.max_instances is None else self.max_instances
            if least > most:
                raise ChangeError("min_instances", f"is {least}, above the most in {region}, {most}")
            bounds = {"min_instances": least, "max_instances": most}
            values.setdefault("endpoints", []).append({"model": self.model, "region": region, **bounds})
            if (missing := max(self.max_instances or 0, least) - sum(map(_places, own))) > 0:
                own[0]["empty"] = own[0].get("empty", 0) + missing

    def words(self, before: Values) -> str:
        where = f" in {region_title(self.region)}" if self.region else ""
        region = self.region or next(iter(before["regions"]))
        now = dict(zip(("min", "max"), bounds_of(before, self.model, region), strict=True))
        to = {"min": self.min_instances, "max": self.max_instances}
        words = [f"{name} {now[name]} to {value}" for name, value in to.items() if value is not None]
        return f"{self.model} {', '.join(words)}{where}"


class FailureChange(Change):
    """Failure of named instances (of a node, say), *count* of a region, or all of it, for some time.

    `spot` is a provider reclaiming *count* instances: like a failure, with the place free again after *for_s*.
    """

    kind: Literal["failure"] = "failure"
    what: Literal["instance", "node", "region", "spot"]
    at_s: AtLeast0
    for_s: AtLeast0 | None = None
    region: str = ""
    model: str = ""
    instances: list[str] = []
    node: str = ""
    count: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _which(self) -> Self:
        if self.what in ("region", "spot") and not self.region:
            raise ValueError("region is missing: where it happens")
        if self.what == "instance" and not self.instances:
            raise ValueError("instances is missing: which are lost")
        if self.what == "node" and not self.instances and not self.node:
            raise ValueError("node is missing: which is lost")
        if self.what == "node" and not self.instances:
            raise ValueError(f"node {self.node} has no instance that is ready: nothing is lost with it")
        return self

    def apply(self, values: Values) -> None:
        lasts: Values = {} if self.for_s is None else {"repair_min": self.for_s / 60}
        at: Values = {"at_h": self.at_s / 3600}
        if self.region:
            known("region", self.region, values["regions"], "region")
        if self.model:
            known("model", self.model, values["models"], "model")
        names = instance_names(values)
        failures = values.setdefault("failures", [])
        match self.what:
            case "region":
                one = {"region": self.region} | ({"model": self.model} if self.model else {})
                failures.append(at | one | lasts)
            case "spot":
                there = (
                    names.get((self.model, self.region), [])
                    if self.model
                    else [name for (_, region), own in names.items() if region == self.region for name in own]
                )
                if len(there) < self.count:
                    raise ChangeError("count", f"is {self.count}; there are {len(there)} instances in {self.region}")
                failures += [at | {"instance": name} | lasts for name in there[: self.count]]
            case _:
                every = [name for _, _, *both in names_by_group(values) for own in both for name in own]
                for name in self.instances:
                    known("instances", name, every, "instance")
                    failures.append(at | {"instance": name} | lasts)

    def words(self, before: Values) -> str:
        lasts = "" if self.for_s is None else f", back {clock(self.for_s)} later"
        where = region_title(self.region) if self.region else ""
        of = f" of {self.model}" if self.model else ""
        match self.what:
            case "region":
                lost = f"{where} is lost{of and f', {self.model} alone'}"
            case "spot":
                lost = f"{self.count} spot instance{'s' * (self.count > 1)}{of} reclaimed in {where}"
            case "node":
                lost = (
                    f"node {self.node or '?'}{where and f' in {where}'} is lost with its {len(self.instances)} places"
                )
            case _:
                lost = f"{', '.join(self.instances)} fails"
        return f"{lost} after {clock(self.at_s)}{lasts}"


def gpus_in(values: Values, region: str, gpu: str) -> int:
    """Return GPUs of a type installed in *region*; if unknown, those used by instance places."""
    fitted = values["gpus"].get(gpu, {}).get("count", {}).get(region)
    return _placed(values, region, gpu) if fitted is None else int(fitted)


def _placed(values: Values, region: str, gpu: str) -> int:
    """Return GPUs of a type in *region* used by the scenario's instance places."""
    return sum(
        _places(group) * group.get("tensor_parallel", 1)
        for group in values["fleet"]
        if group["gpu"] == gpu and region in group["regions"]
    )


def bounds_of(values: Values, model: str, region: str) -> tuple[int, int]:
    """Return the scenario's minimum and maximum instances of *model* in *region*."""
    scaling = values.get("scaling") or {}
    bounds = {"min_instances": scaling.get("min_instances", 2), "max_instances": scaling.get("max_instances", 20)}
    for endpoint in values.get("endpoints", []):
        if endpoint["model"] == model and endpoint.get("region") in (None, region):
            bounds |= {name: endpoint[name] for name in bounds if endpoint.get(name) is not None}
    return bounds["min_instances"], bounds["max_instances"]


def instance_names(values: Values) -> dict[tuple[str, str], list[str]]:
    """Return names of initially ready instances, by model and region, as in `cluster.description`."""
    names: dict[tuple[str, str], list[str]] = {}
    for group, region, own, _ in names_by_group(values):
        names.setdefault((group["model"], region), []).extend(own)
    return names


def names_by_group(values: Values) -> Iterator[tuple[Values, str, list[str], list[str]]]:
    """Yield each fleet group per region, with the names of its initially ready instances and its empty places."""
    ready: Counter[tuple[str, str]] = Counter()
    rest: Counter[tuple[str, str]] = Counter()
    for group in values["fleet"]:
        rest.update({(group["model"], region): group["instances"] for region in group["regions"]})
    for group in values["fleet"]:
        for region in group["regions"]:
            key, others = (group["model"], region), _places(group) - group["instances"]
            name = f"{group['model']}-{region}-"
            first, last = rest[key] + others - group.get("empty", 0), rest[key] + others
            here = [f"{name}{number}" for number in range(ready[key] + 1, ready[key] + group["instances"] + 1)]
            ready[key] += group["instances"]
            rest[key] += others
            yield group, region, here, [f"{name}{number}" for number in range(first + 1, last + 1)]


def _places(group: Values) -> int:
    return sum(int(group.get(name, 0)) for name in ("instances", "spot", "empty", "asleep"))


def _least_used(group: Values) -> str:
    """Return the kind of place that *group* gives up next; empty if none is left."""
    return next((name for name in ("empty", "spot", "asleep", "instances") if group.get(name, 0) > 0), "")


def _own_groups(values: Values, region: str) -> list[Values]:
    """Return the fleet groups of *region*; a multi-region group is split, so that each can change alone."""
    fleet: list[Values] = []
    for group in values["fleet"]:
        others = [other for other in group["regions"] if other != region]
        if region not in group["regions"] or not others:
            fleet.append(group)
            continue
        fleet += [group | {"regions": [region]}, group | {"regions": others}]
    values["fleet"] = fleet
    return [group for group in fleet if group["regions"] == [region]]


def _raise_bound(values: Values, model: str, region: str, count: int) -> None:
    """Raise the bound of *model* in *region* by *count* instances, if it is scaled."""
    if values.get("scaling") is None and not any(each.get("bundle") for each in values["models"].values()):
        return
    least, most = bounds_of(values, model, region)
    entry = {"model": model, "region": region, "min_instances": least, "max_instances": most + count}
    values.setdefault("endpoints", []).append(entry)
