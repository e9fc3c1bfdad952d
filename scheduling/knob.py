"""Declaring a knob of a policy once, so that tables, schemas, columns, settings and arrays can be derived from it."""

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
    """The column of a live deployment that holds a knob, where its terms differ from those of a scenario."""

    name: str = ""
    """Empty: the name of the knob."""
    default: Any = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    """Those that a live deployment can have; empty: all."""
    summed: bool = False
    """Whether the deployments of one endpoint add up. Otherwise the oldest decides."""


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
    """Allowed names with their titles; arrays hold the place of a name."""
    absent: int = 0
    """The value in arrays for None."""
    setting: str = ""
    """The per-model setting that holds it live."""
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
        """The reason to refuse *value*, as the end of a sentence; empty if it is in range."""
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
    """A structure of knobs. ValueError names the first one whose value is out of range."""

    def __post_init__(self) -> None:
        for name, declared in knobs(type(self)).items():
            if problem := declared.problem(getattr(self, name)):
                raise ValueError(f"{name} {problem}")


@cache
def knobs(struct: type[Policy]) -> dict[str, Declared]:
    """The knobs of *struct* by name; fields that are structures themselves are left out."""
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
    """The fields of *struct* that are structures of knobs themselves."""
    hints = get_type_hints(struct)
    return {each.name: hints[each.name] for each in fields(struct) if each.name not in knobs(struct)}
