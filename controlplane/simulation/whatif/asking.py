"""What a form asks: a scenario and changes of the fleet made into futures, with names that say all of it; and text with what
it has no field for.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.changes.base import ChangeError, Values
from controlplane.simulation.whatif.changes.presets import PRESETS
from controlplane.simulation.whatif.models import LETTERS
from controlplane.simulation.whatif.starts.begin import Begin


class AdvancedFuture(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = ""
    preset: str = ""
    changes: list[dict[str, Any]] = []


class Advanced(BaseModel):
    """What has no field, as `POST /api/what-ifs` takes it."""

    model_config = ConfigDict(extra="forbid")

    begin: Begin | None = None
    edits: list[dict[str, Any]] = []
    futures: list[AdvancedFuture] = []


def advanced_of(text: str) -> Advanced:
    """Read TOML or JSON. Raise ChangeError saying where it is wrong."""
    try:
        return Advanced.model_validate(json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ChangeError(f"Advanced, {'.'.join(map(str, first['loc']))}", first["msg"]) from None
    except ValueError as error:
        raise ChangeError("Advanced", f"is neither TOML nor JSON: {error}") from None


AS_NOW = "As now"
Changes = list[Values]


def words_of(changes: Sequence[Mapping[str, Any]], values: Values) -> str:
    """Say all that *changes* of the scenario *values* are, in a line; those that cannot be are named with the futures."""
    try:
        return "; ".join(in_words(values, parsed(changes))) if values else "Changed"
    except ChangeError:
        return "Changed"


def futures_of(values: Values, beside: Changes, presets: Sequence[str], fleet: Changes) -> list[dict[str, Any]]:
    """Return the futures: as now, as now with the changes *beside* it, then with each of *presets* and with *fleet* changed.

    Each has a name that says all that is in it.
    """
    said = words_of(beside, values)
    made = [(PRESETS[name].title, list(PRESETS[name].changes)) for name in presets if name in PRESETS]
    made += [(words_of(fleet, values), fleet)] if fleet else []
    futures: list[dict[str, Any]] = [
        {"name": AS_NOW, "changes": []},
        *([{"name": said[:80], "changes": beside}] if beside else []),
    ]
    with_it = f" with {said}" if beside else ""
    return futures + [{"name": f"{name}{with_it}"[:80], "changes": [*beside, *map(dict, each)]} for name, each in made]


def title_of(values: Values, edits: Changes, futures: Sequence[Mapping[str, Any]]) -> str:
    """Return the question: what happens in all futures, and what each of *futures*, but A, is."""
    said = [words_of(edits, values) if edits else "", ", ".join(one["name"] for one in futures if one.get("name"))]
    return f"What if … {'; '.join(filter(None, said)) or 'nothing changes'}"[:160]


def described(
    values: Values, edits: Changes, futures: Sequence[Mapping[str, Any]]
) -> tuple[list[Values], dict[str, str]]:
    """Return the futures with letters and changes in words, and what is wrong with them by place."""
    shown, errors = [], dict[str, str]()
    for letter, one in zip(LETTERS, futures, strict=False):
        words: list[str] = []
        try:
            if values:
                changes = [*parsed(edits, "Scenario"), *parsed(one["changes"], one["name"])]
                applied(values, changes, asks=bool(values.get("clients")), shared=len(edits))
                words = in_words(values, changes)[len(edits) :]
        except ChangeError as error:
            place = error.field if error.field.startswith(f"{one['name']}[") else f"{one['name']}, {error.field}"
            errors[place] = error.what
        shown.append({"letter": letter, "name": one["name"], "words": words})
    if len(futures) > len(LETTERS):
        errors["Futures"] = f"{len(futures)} are more than {len(LETTERS)}; leave some out"
    return shown, errors
