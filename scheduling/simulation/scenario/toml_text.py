"""Write a scenario as TOML: one header per table, one line per value."""

import json
import re
from collections.abc import Mapping
from typing import Any


def to_toml(values: Mapping[str, Any]) -> str:
    """Return *values*, in the form that `check_scenario` takes, as TOML. None is left out, for TOML has none."""
    lines = [f"{_key(name)} = {_value(value)}" for name, value in values.items() if not isinstance(value, dict | list)]
    for name, value in values.items():
        if isinstance(value, list):
            for element in value:
                lines += ["", f"[[{_key(name)}]]", *_lines(element)]
        elif isinstance(value, dict):
            if value and all(isinstance(each, dict) for each in value.values()):
                for inner, table in value.items():
                    lines += ["", f"[{_key(name)}.{_key(inner)}]", *_lines(table)]
            else:
                lines += ["", f"[{_key(name)}]", *_lines(value)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items() if value is not None]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(_lines(value)) + " }" if value else "{}"
        case list():
            return "[" + ", ".join(_value(each) for each in value) + "]"
        case float() | bool() | int():
            return repr(value).lower()
        case _:
            # A JSON string is a TOML string, except for the one control character that JSON leaves unescaped.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
