"""Changes of decisions: bundles, single policies, accuracy of predicted lengths, and any other key."""

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from controlplane.simulation.whatif.changes.base import Change, ChangeError, Values, known, models_words, titled
from forecasting.workload import FORECASTERS, unavailable_reason
from scheduling.bundles import BUNDLES, SAID
from scheduling.policy import ORDERS, ROUTERS
from scheduling.queueing.release_rule import RELEASES
from scheduling.scaling import NO_STRATEGY, STRATEGIES, make_strategy
from scheduling.simulation.workload.edits import Edit, Retarget

PARTS: Final = {
    "bundle": tuple(BUNDLES),
    "routing": tuple(ROUTERS),
    "ordering": tuple(ORDERS),
    "strategy": (*STRATEGIES, NO_STRATEGY),
    "forecaster": ("oracle", "recent", *FORECASTERS),
    "demand_level": ("strategy", "mean", "upper_80"),
    "release": tuple(RELEASES),
}
TITLES: Final = {
    "bundle": "policy", "routing": "router", "ordering": "order", "strategy": "strategy", "forecaster": "forecaster",
    "demand_level": "planned demand", "release": "release of non-interactive work",
}  # fmt: skip
OF_A_BUNDLE: Final = (*SAID, "strategy", "parameters", "forecaster", "demand_level", "niw", "niw_share")
"""Keys of `[[endpoints]]` set by a bundle, replacing the scenario's."""


class PolicyChange(Change):
    """Replacement *value* for the bundle, or one part, of *models* (empty: all)."""

    kind: Literal["policy"] = "policy"
    part: Literal["bundle", "routing", "ordering", "strategy", "forecaster", "demand_level", "release"]
    value: str
    parameters: dict[str, FiniteFloat] = {}
    models: list[str] = []

    def apply(self, values: Values) -> None:
        known("value", self.value, PARTS[self.part], TITLES[self.part])
        if self.part == "forecaster" and (reason := unavailable_reason(self.value)):
            raise ChangeError("value", reason)
        for model in self._models(values):
            if self.part == "bundle":
                self._give_bundle(values, model)
                continue
            entry: Values = {"model": model, self.part: self.value}
            if self.part == "release":
                entry = {"model": model, "niw": {**_release(values, model), "by": self.value}}
            if self.part == "strategy":
                try:
                    make_strategy(self.value, self.parameters)
                except ValueError as error:
                    raise ChangeError("parameters", str(error)) from None
                entry["parameters"] = {**_marks(values, model, self.value), **self.parameters}
                values.setdefault("scaling", {"strategy": NO_STRATEGY})
            values.setdefault("endpoints", []).append(entry)
        if self.parameters and self.part != "strategy":
            raise ChangeError("parameters", "are those of a strategy")

    def _give_bundle(self, values: Values, model: str) -> None:
        values["models"][model]["bundle"] = self.value
        for endpoint in values.get("endpoints", []):
            if endpoint["model"] == model:
                for name in OF_A_BUNDLE:
                    endpoint.pop(name, None)

    def _models(self, values: Values) -> list[str]:
        for model in self.models:
            known("models", model, values["models"], "model")
        return self.models or list(values["models"])

    def words(self, before: Values) -> str:
        title = BUNDLES[self.value].title if self.part == "bundle" else titled(self.value)
        words = f"{TITLES[self.part]} to {title}, {models_words(self.models, before)}"
        if self.part == "bundle":
            strategy, own = BUNDLES[self.value].strategy, BUNDLES[self.value].parameters
        elif self.part == "strategy":
            strategy, own = self.value, self.parameters
        else:
            return words
        marks = {model: _marks(before, model, strategy) for model in self.models or before["models"]}
        said: dict[str, list[str]] = {}
        for model, each in marks.items():
            text = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in each.items() if name not in own)
            said.setdefault(text, []).append(model)
        said.pop("", None)
        if not said:
            return words
        settings = "; ".join(
            f"{text} ({', '.join(models)})" if len(models) < len(marks) else text for text, models in said.items()
        )
        return f"{words}, with the marks that settings give: {settings}"


def _release(values: Values, model: str) -> Values:
    """Return the release rule of *model* as the scenario has it."""
    given = [one["niw"] for one in values.get("endpoints", []) if one["model"] == model and one.get("niw")]
    return dict(given[-1] if given else values.get("policies", {}).get("niw", {}))


def _marks(values: Values, model: str, strategy: str) -> dict[str, float]:
    """Return the parameters that settings of *model* give *strategy* when it is used live."""
    return dict(values["models"].get(model, {}).get("marks", {}).get(strategy, {}))


class LengthsChange(Change):
    """Accuracy of the dispatcher's output lengths: see docs/plan/simulation.md, `[predictions]`."""

    kind: Literal["predictions"] = "predictions"
    to: Literal["exact", "error", "none"]
    log_sd: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    bias: Annotated[FiniteFloat, Field(gt=0)] = 1.0

    def apply(self, values: Values) -> None:
        values["predictions"] = {"kind": self.to, "log_sd": self.log_sd, "bias": self.bias}

    def words(self, before: Values) -> str:
        match self.to:
            case "exact":
                return "output lengths known exactly"
            case "none":
                return "output lengths unknown: the mean of the model"
        bias = (
            "" if self.bias == 1.0 else f", {self.bias:g}x too long" if self.bias > 1 else f", {self.bias:g}x as long"
        )
        return f"output lengths known with a log error of {self.log_sd:g}{bias}"


class FallbackChange(Change):
    """The model that serves requests of *model* where it does not; an empty *to*: none does.

    Without *wait_s* it does not serve what would wait, however long.
    """

    kind: Literal["fallback"] = "fallback"
    model: str
    to: str = ""
    wait_s: Annotated[FiniteFloat, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.wait_s is not None and not self.to:
            raise ValueError("wait_s is given without a fallback: name one in to")
        if self.to == self.model:
            raise ValueError(f"to is {self.to}, the model itself")
        return self

    def apply(self, values: Values) -> None:
        model = values["models"][known("model", self.model, values["models"], "model")]
        model.pop("fallback", None)
        model.pop("fallback_wait_s", None)
        if self.to:
            model["fallback"] = known("to", self.to, values["models"], "model")
        if self.wait_s is not None:
            model["fallback_wait_s"] = self.wait_s

    def words(self, before: Values) -> str:
        if not self.to:
            return f"no fallback of {self.model}"
        wait = "" if self.wait_s is None else f", also after a wait of {self.wait_s:g} s"
        return f"{self.to} is the fallback of {self.model}{wait}"


class WeightsChange(Change):
    """Weights of targets that share the requests for the public *name*; those of other targets stay."""

    kind: Literal["weights"] = "weights"
    name: str
    weights: Annotated[dict[str, Annotated[FiniteFloat, Field(ge=0)]], Field(min_length=1)]

    def apply(self, values: Values) -> None:
        weights = values.get("weighted_targets", {})
        weights = weights[known("name", self.name, weights, "public name")]
        for model in self.weights:
            known("weights", model, values["models"], "model")
        weights |= self.weights
        if not any(weights.values()):
            raise ChangeError("weights", f"are all 0: nothing would serve {self.name}")

    def edits(self, values: Values, seed: int, horizon_s: float) -> list[Edit]:
        return [Retarget(self.name, values["weighted_targets"][self.name])]

    def words(self, before: Values) -> str:
        now = before["weighted_targets"].get(self.name, {})
        shares = (f"{model} {now.get(model, 0):g} to {weight:g}" for model, weight in self.weights.items())
        return f"weights of {self.name}: {', '.join(shares)}"


class KeyChange(Change):
    """Any key of the scenario, such as `planner.epsilon` or `endpoints[2].ordering`."""

    kind: Literal["key"] = "key"
    path: Annotated[str, Field(max_length=200)]
    value: Any

    def apply(self, values: Values) -> None:
        *before, last = self._steps()
        place: Any = values
        for step in before:
            place = self._enter(place, step)
        if isinstance(last, int):
            if not isinstance(place, list) or not 0 <= last < len(place):
                raise ChangeError("path", f"{self.path} is not there")
            place[last] = self.value
        elif isinstance(place, dict):
            place[last] = self.value
        else:
            raise ChangeError("path", f"{self.path} is not there")

    def _steps(self) -> list[str | int]:
        if not re.fullmatch(r"[\w-]+(\[\d+\])?(\.[\w. -]+?(\[\d+\])?)*", self.path):
            raise ChangeError("path", f"{self.path!r} is no path such as planner.epsilon or endpoints[0].routing")
        steps: list[str | int] = []
        for part in self.path.split("."):
            name, *indices = re.split(r"[\[\]]+", part.rstrip("]"))
            steps += [name, *(int(each) for each in indices)]
        return steps

    def _enter(self, place: Any, step: str | int) -> Any:
        if isinstance(step, int):
            if not isinstance(place, list) or not 0 <= step < len(place):
                raise ChangeError("path", f"{self.path} is not there")
            return place[step]
        if not isinstance(place, dict):
            raise ChangeError("path", f"{self.path} is not there")
        return place.setdefault(step, {})

    def words(self, before: Values) -> str:
        place: Any = before
        for step in self._steps():
            try:
                place = place[step]
            except (KeyError, IndexError, TypeError):
                return f"{self.path} to {self.value}"
        return f"{self.path} {place} to {self.value}"
