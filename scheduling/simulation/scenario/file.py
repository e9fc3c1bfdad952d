"""Read scenario files; an invalid one is refused with the file, the line and the key. Keys: docs/plan/simulation.md."""

import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from scheduling.simulation.scenario.parts import ScenarioTable
from scheduling.simulation.scenario.references import unresolved
from scheduling.simulation.scenario.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import Key, ScenarioError, wrong_at


def load_scenario(path: Path) -> Scenario:
    """Return the scenario at *path*. Raise ScenarioError."""
    return check_scenario(read_toml(path), path, text_of(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the unchecked tables of the file at *path*. Raise ScenarioError if it is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(path, 0, "", getattr(error, "strerror", None) or str(error)) from error
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        position = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
        line, what = (int(position[1]), str(error).replace(position[0], "")) if position else (0, str(error))
        raise ScenarioError(path, line, "", f"is not TOML: {what}") from error


def text_of(path: Path) -> str:
    """Return the TOML at *path*, for lines in errors; empty for a scenario that is not a file."""
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def check_scenario(values: Any, path: Path, text: str = "", asks: bool = True) -> Scenario:
    """Return the scenario with *values* read from *path*; *text* is its TOML, for lines. Raise ScenarioError.

    Unless it *asks*, its requests come from elsewhere and it needs no demand.
    """
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise wrong_at(path, text, _location(first["loc"], values), _words(first)) from error
    for key, what in unresolved(scenario, asks):
        raise wrong_at(path, text, key, what)
    return scenario


def _location(location: tuple[int | str, ...], values: Any) -> Key:
    """Return *location* without pydantic's steps for unions: only steps that the file has, and a last one that it lacks."""
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
        return f"is not a key here; there is {', '.join(_table(error['loc'][:-1]).model_fields)}"
    message = message.removeprefix("Value error, ").removeprefix("Input ")
    value = error["input"]
    return message if isinstance(value, dict | list) or f"not {value!r}" in message else f"{message}, not {value!r}"


def _table(location: tuple[int | str, ...]) -> type[ScenarioTable]:
    """Return the kind of table at *location*."""
    table: type[ScenarioTable] = Scenario
    steps = iter(location)
    for step in steps:
        annotation = table.model_fields[str(step)].annotation
        table = _part_in(annotation) or table
        if get_origin(annotation) in (list, dict):
            next(steps, None)  # the number of an element, or its name
    return table


def _part_in(annotation: Any) -> type[ScenarioTable] | None:
    if isinstance(annotation, type) and issubclass(annotation, ScenarioTable):
        return annotation
    return next((part for each in get_args(annotation) if (part := _part_in(each))), None)
