"""Declare a policy's knobs once; tables, schemas, columns, settings and arrays are derived from the declaration."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Column of a live deployment that holds a knob, where it differs from the scenario's field."""

    name: str = ""
    """Empty: the knob's name."""
    default: Any = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    """Choices available live; empty: all."""
    summed: bool = False
    """Whether the values of an endpoint's deployments are added up. Otherwise the oldest deployment's value applies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Metadata of a field of a policy structure."""

    help: str
    title: str = ""
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: Mapping[str, str] | None = None
    """Allowed names with their titles; arrays hold a name's position."""
    absent: int = 0
    """Array value of None."""
    setting: str = ""
    """Per-model setting that holds the knob live."""
    column: Column | None = None


class Declared(NamedTuple):
    """One knob of a structure."""

    name: str
    type: Any
    """Without None."""
    optional: bool
    default: Any
    knob: Knob

    def problem(self, value: Any) -> str:
        """Return why *value* is refused, as the end of a sentence; empty if it is in range."""
        knob = self.knob
        if value is None and self.optional:
            return ""
        if knob.choices is not None:
            return "" if value in knob.choices else f"must be one of {', '.join(knob.choices)}, not {value!r}"
        if self.type is bool:
            return "" if isinstance(value, bool) else f"must be true or false, not {value!r}"
        whole = self.type is not int or isinstance(value, int)
        low = (knob.ge is None or value >= knob.ge) and (knob.gt is None or value > knob.gt)
        if whole and low and value <= (math.inf if knob.le is None else knob.le) and math.isfinite(value):
            return ""
        limits = [f"{word} {limit:g}" for word, limit in self.limits().items()]
        return f"must be {' and '.join(limits) or 'a number'}, not {value}"

    def limits(self) -> dict[str, float]:
        words = {"at least": self.knob.ge, "above": self.knob.gt, "at most": self.knob.le}
        return {word: limit for word, limit in words.items() if limit is not None}


class Policy(Struct, frozen=True):
    """A structure of knobs. Raises ValueError for the first knob whose value is out of range."""

    def __post_init__(self) -> None:
        for name, declared in knobs(type(self)).items():
            if problem := declared.problem(getattr(self, name)):
                raise ValueError(f"{name} {problem}")


@cache
def knobs(struct: type[Policy]) -> dict[str, Declared]:
    """Return the knobs of *struct* by name, without fields that are structures themselves."""
    hints, declared = get_type_hints(struct, include_extras=True), {}
    for each in fields(struct):
        knob = next((one for one in getattr(hints[each.name], "__metadata__", ()) if isinstance(one, Knob)), None)
        if knob is None:
            continue
        kind = hints[each.name].__origin__
        optional = isinstance(kind, UnionType)
        kind = next(one for one in get_args(kind) if one is not type(None)) if optional else kind
        assert each.default is not NODEFAULT
        declared[each.name] = Declared(each.name, kind, optional, each.default, knob)
    return declared


@cache
def nested(struct: type[Policy]) -> dict[str, type[Policy]]:
    """Return the fields of *struct* that are structures of knobs."""
    hints = get_type_hints(struct)
    return {each.name: hints[each.name] for each in fields(struct) if each.name not in knobs(struct)}
