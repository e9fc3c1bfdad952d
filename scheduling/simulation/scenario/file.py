"""Reading scenario files: a wrong one is refused with the file, the line and the key. Keys: docs/simulation.md."""

import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from scheduling.simulation.scenario.loose_ends import loose_ends
from scheduling.simulation.scenario.scenario import Scenario
from scheduling.simulation.scenario.toml_lines import Key, ScenarioError, wrong_at


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
    for key, what in loose_ends(scenario):
        raise wrong_at(path, text, key, what)
    return scenario


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
