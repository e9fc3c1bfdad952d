"""Policy bundles (`scheduling.bundles`) of models, read from their rows; switching writes the rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Model as Row

from controlplane.fleet.models import Deployment, Model
from controlplane.planning.models import ScalingPolicy
from controlplane.planning.parts import unavailable_reasons
from controlplane.planning.titles import title_of
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import Values, tuned
from controlplane.tuning.selectors import read as read_settings
from scheduling.bundles import BUNDLES, SAID, Bundle
from scheduling.policy import KNOBS
from scheduling.policy import SETTINGS as DECLARED

HELD: Final = {name: KNOBS[name].knob for name in SAID}
COLUMNS: Final = {knob.column.name: name for name, knob in HELD.items() if knob.column is not None}
KNOB_SETTINGS: Final = {knob.setting: name for name, knob in HELD.items() if knob.setting}
SETTINGS: Final = ("FORECASTER", "PLAN_DEMAND", "NIW_RELEASE", "PLAN_NIW_BUFFER", "SPOT_DONATE", *KNOB_SETTINGS)
"""Settings that a bundle sets per model."""
SET: Final = (*COLUMNS, "strategy", "parameters", *SETTINGS)
"""What a bundle sets, named as in `values_of`."""
NONE: Final = "none"


def values_of(bundle: Bundle) -> dict[str, Any]:
    """Return the values of *bundle*, by column and setting names."""
    return {
        **{column: bundle.policy[name] for column, name in COLUMNS.items()},
        "strategy": bundle.strategy,
        "parameters": bundle.parameters,
        "FORECASTER": bundle.forecaster,
        "PLAN_DEMAND": bundle.plan_demand,
        "NIW_RELEASE": bundle.release,
        "PLAN_NIW_BUFFER": bundle.niw_share,
        "SPOT_DONATE": bundle.donates or tuned().SPOT_DONATE,
        **{setting: bundle.policy[name] for setting, name in KNOB_SETTINGS.items()},
    }


CUSTOM: Final = "custom"


@dataclass(frozen=True, slots=True)
class Difference:
    """One value, *what*, in which a model differs from a bundle."""

    what: str
    present: Any
    bundled: Any


@dataclass(frozen=True, slots=True)
class Present:
    """Present values of a model's rows. *nearest* is its bundle, or the one with the fewest differences."""

    model: Model
    values: dict[str, Any]

    @property
    def nearest(self) -> Bundle:
        return min(BUNDLES.values(), key=lambda bundle: len(self.differences(bundle)))

    @property
    def name(self) -> str:
        """Name of its bundle, or `custom`."""
        return CUSTOM if self.differences(self.nearest) else self.nearest.name

    @property
    def title(self) -> str:
        return "Custom" if self.name == CUSTOM else self.nearest.title

    def differences(self, bundle: Bundle) -> list[Difference]:
        """Return what *bundle* would change."""
        return self.changed(values_of(bundle))

    def changed(self, values: Mapping[str, Any]) -> list[Difference]:
        """Return what *values*, named as in `values_of`, would change."""
        return [
            Difference(what, self.values[what], value) for what, value in values.items() if self.values[what] != value
        ]


def rows_of(*models: Model) -> list[Row]:
    """Return the rows that the policies of *models* are read from, with their key if they are stored under one for good."""
    return [
        *models,
        *Deployment.objects.filter(model__in=models),
        *ScalingPolicy.objects.filter(model__in=models),
        *(Setting(name=name, model=model) for name in SETTINGS for model in models),
    ]


def present(model: Model) -> Present:
    """Return the present values of *model*. Policies of differing deployments are joined with commas."""
    return presents([model])[model.pk]


def presents(models: Iterable[Model]) -> dict[int, Present]:
    """Return the present values of several models, by key, in three queries."""
    models = list(models)
    settings = read_settings()
    policies = {row.model_id: row for row in ScalingPolicy.objects.filter(model__in=models)}
    deployments: dict[int, list[Deployment]] = {}
    for row in Deployment.objects.filter(model__in=models).order_by("pk"):
        deployments.setdefault(row.model_id, []).append(row)
    return {
        model.pk: Present(model, _values(model, deployments.get(model.pk, []), policies.get(model.pk), settings))
        for model in models
    }


def _values(
    model: Model, deployments: Iterable[Deployment], policy: ScalingPolicy | None, settings: Values
) -> dict[str, Any]:
    rows = list(deployments)
    values: dict[str, Any] = {
        column: ", ".join(sorted({getattr(row, column) for row in rows})) or NONE for column in COLUMNS
    }
    values |= {"strategy": policy.strategy if policy else NONE, "parameters": policy.parameters if policy else {}}
    in_force = settings.given(model.name)
    return values | {name: in_force[name] for name in SETTINGS}


WORDS = {
    "routing_policy": "router",
    "ordering_policy": "order",
    "strategy": "autoscaler",
    "parameters": "parameters",
    "FORECASTER": "forecaster",
    "PLAN_DEMAND": "demand planned for",
    "NIW_RELEASE": "release of held requests",
    "PLAN_NIW_BUFFER": "room for deferred work",
    "SPOT_DONATE": "spot pool",
    **{name: declared.knob.title for name, declared in DECLARED.items()},
}
"""Names of the settings in a bundle, for readers."""


def choices(models: Sequence[Model]) -> dict[int, dict[str, Any]]:
    """Return by the key of each of *models* its bundle, and each bundle with its changes from now."""
    return {
        key: {
            "title": present.title,
            "name": present.name,
            "differs": "" if present.name != CUSTOM else _changes(present, present.nearest, "has"),
            "nearest": present.nearest.title,
            "choices": [
                {
                    "name": each.name,
                    "title": each.title,
                    "about": each.about,
                    "changes": _changes(present, each),
                    "unavailable_reason": unavailable_reasons(values_of(each)),
                }
                for each in BUNDLES.values()
            ],
        }
        for key, present in presents(models).items()
    }


def _changes(present: Present, bundle: Bundle, of: str = "") -> str:
    """Describe the changes of *bundle*: "router preserve instead of least_delay"; for a custom one, its values."""
    said = []
    for each in present.differences(bundle):
        first, second = (each.present, each.bundled) if of else (each.bundled, each.present)
        said.append(f"{WORDS[each.what]} {_said(first)} instead of {_said(second)}")
    return ", ".join(said)


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:g}" for name, number in value.items()) or "its own"
    return title_of(str(value)) or "in use"
