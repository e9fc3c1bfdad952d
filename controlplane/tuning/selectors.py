"""Effective values of settings: the model's, else that for all models, else the default.

The gateway reads `Values` with its inventory and hands them on; on its event loop nothing here is called. All others call
`tuned`, which reads the rows at most once a second.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from django.conf import settings
from django.core.exceptions import ValidationError
from pydantic import ValidationError as WrongValue

from controlplane.tunable import GROUPS, PER_MODEL, Tunable, limits_of, unit_of
from controlplane.tuning.models import Setting

checks: Final[list[Callable[[str, Callable[[str], Tunable]], None]]] = []
"""Checks of apps above on a change of a setting: each raises ValueError with a sentence. The function returns the values
that a model would have."""
KINDS: Final = {"bool": "boolean", "int": "integer", "float": "number", "str": "text"}
FRESH_S = 1.0
"""Seconds for which values are cached."""


@dataclass(frozen=True)
class Values:
    """Effective values: *rows* by model ("" for all models) and name.

    *ignored* are rows whose values cannot be, with the reason: an older release or SQL wrote them.
    """

    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ignored: Mapping[tuple[str, str], str] = field(default_factory=dict)
    _made: dict[str, Tunable] = field(default_factory=dict, repr=False, compare=False)

    def of(self, model: str = "") -> Tunable:
        """Return the values for *model*, or those for all models without a name."""
        own = model if model in self.rows else ""
        if own not in self._made:
            self._made[own] = Tunable.model_construct(**self.given(own))
        return self._made[own]

    def given(self, model: str = "") -> dict[str, Any]:
        """Return the same values by name."""
        return defaults() | dict(self.rows.get("", {})) | dict(self.rows.get(model, {}))


def defaults() -> dict[str, Any]:
    """Return values without rows: the environment's, else the declared defaults."""
    return {name: getattr(settings, name) for name in Tunable.model_fields}


def read() -> Values:
    """Read the current rows. Left out are settings that only an older release declared, and values that cannot be."""
    rows: dict[str, dict[str, Any]] = {}
    for model, name, value in Setting.objects.order_by().values_list("model__name", "name", "value"):
        declared = Tunable.model_fields.get(name)
        if declared is not None and (model is None or PER_MODEL in declared.metadata):
            rows.setdefault(model or "", {})[name] = value
    sound: dict[str, dict[str, Any]] = {}
    ignored: dict[tuple[str, str], str] = {}
    for model in sorted(rows):  # "", all models, is the first
        below = defaults() | sound.get("", {})
        sound[model], wrong = _sound(below, rows[model])
        ignored |= {(model, name): reason for name, reason in wrong.items()}
    return Values(sound, ignored)


def _sound(below: Mapping[str, Any], rows: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return those of *rows* that can be in force over *below*, and why the others cannot."""
    kept, wrong = dict(rows), dict[str, str]()
    while kept:
        try:
            Tunable.model_validate({**below, **kept}, strict=True)
            break
        except WrongValue as error:
            reasons: dict[str, str] = {}
            for each in error.errors():
                reason = each["msg"].removeprefix("Value error, ")
                words = f"{each['loc'][0]} {reason}".replace(",", "").split()  # a limit may be another setting
                reasons |= dict.fromkeys((name for name in kept if name in words), reason)
            wrong |= reasons or dict.fromkeys(kept, str(error))
            kept = {name: value for name, value in kept.items() if name not in wrong}
    return kept, wrong


def without_rows() -> Tunable:
    """Return the default settings."""
    return Values().of()


class Latest:
    """Values of this process, read again on use once older than `FRESH_S`."""

    def __init__(self) -> None:
        self._read_s, self._values = -math.inf, Values()

    def of(self, model: str = "") -> Tunable:
        """Return the values for *model*. Raises database errors."""
        if time.monotonic() - self._read_s > FRESH_S:
            self._values = read()
            self._read_s = time.monotonic()
        return self._values.of(model)

    def forget(self) -> None:
        """Read the rows again at the next call."""
        self._read_s = -math.inf


latest = Latest()
tuned = latest.of


@dataclass(frozen=True, slots=True)
class Described:
    """One setting with its effective value, for all models or for *model*."""

    name: str
    group: str
    purpose: str
    kind: str  # boolean, integer, number, choice or text
    unit: str
    limits: str
    choices: tuple[str, ...]
    per_model: bool
    default: Any  # without a row
    value: Any  # in force
    row: Setting | None  # whose value that is
    model: str = ""


def described(model: str = "") -> list[Described]:
    """Return every setting; with *model*, those that can be overridden per model with its values."""
    rows = {(row.model.name if row.model else "", row.name): row for row in Setting.objects.select_related("model")}
    values = read().given(model)
    default = read().given() if model else defaults()
    made = []
    for group in GROUPS:
        for name in group.model_fields:
            declared = Tunable.model_fields[name]
            per_model = PER_MODEL in declared.metadata
            if model and not per_model:
                continue
            made.append(
                Described(
                    name=name,
                    group=group.__doc__ or "",
                    purpose=" ".join((declared.description or "").split()),
                    kind=KINDS.get(str(getattr(declared.annotation, "__name__", "")), "choice"),
                    unit=unit_of(declared),
                    limits=limits_of(declared),
                    choices=choices_of(name),
                    per_model=per_model,
                    default=default[name],
                    value=values[name],
                    row=rows.get((model, name)),
                    model=model,
                )
            )
    return made


def choices_of(name: str) -> tuple[str, ...]:
    """Return the allowed values of the setting *name*, if they are few."""
    if name == "FORECASTER":
        from forecasting.workload import FORECASTERS

        return ("", *FORECASTERS)
    return get_args(Tunable.model_fields[name].annotation)


def checked(name: str, value: object, model: str = "") -> Any:
    """Return *value* as it would be stored for the setting *name*, checked with all others.

    Text is parsed as in the environment. Raises ValidationError that names the setting, the value and the limit.
    """
    values = read()
    for other in {model, *values.rows} if not model else {model}:
        in_force = values.given(other)
        if other == model or name not in values.rows.get(other, {}):
            in_force[name] = value
        try:
            made = Tunable.model_validate(in_force, strict=None if isinstance(value, str) else True)
        except WrongValue as error:
            first = error.errors()[0]
            of = f" with the values of {other}" if other != model else ""
            reason = first["msg"].removeprefix("Value error, ")
            raise ValidationError({"value": f"{name} cannot be {value!r}{of}. {reason}."}) from None
        if other == model:
            kept = getattr(made, name)
    changed = Values({**values.rows, model: {**values.rows.get(model, {}), name: kept}})
    for check in checks:
        try:
            check(name, changed.of)
        except ValueError as error:
            raise ValidationError({"value": f"{name} cannot be {value!r}. {error}."}) from None
    return kept
