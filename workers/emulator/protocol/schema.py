"""A value that fits a JSON schema, drawn with a number: arguments of emulated tool calls, and answers of a given form.

Types, properties, items, enumerations, bounds, combinations and references within the schema are kept. What only a solver
could keep (`pattern`, `not`, `multipleOf`) is not.
"""

from typing import Any

from workers.emulator import text

MOST_DEPTH = 12
OPTIONAL_DEPTH = 3
"""Deeper than this, only properties that are required are given: a schema may refer to itself."""
FORMATS = {
    "date": "2026-01-15",
    "date-time": "2026-01-15T12:00:00Z",
    "time": "12:00:00Z",
    "email": "officer@example.org",
    "uri": "https://example.org/log",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
MOST_WORDS = 4


def example(schema: Any, number: int) -> Any:
    """The value that *number* (64 bits) draws; always the same one for the same number."""
    return _draw(schema, number, schema, 0)


def _draw(schema: Any, number: int, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > MOST_DEPTH:
        return None
    if isinstance(schema.get("$ref"), str):
        return _draw(_referred(schema["$ref"], root), number, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return schema["enum"][number % len(schema["enum"])]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and schema[name]:
            return _draw(schema[name][number % len(schema[name])], number, root, depth + 1)
    if isinstance(schema.get("allOf"), list):
        return _draw(_merged(schema, root), number, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind == "object" or (kind is None and "properties" in schema):
        return _object(schema, number, root, depth)
    if kind == "array":
        least, most = int(schema.get("minItems", 1)), int(schema.get("maxItems", 3))
        count = max(least, min(most, 1 + number % 2))
        return [_draw(schema.get("items", {}), text.mixed(number, place), root, depth + 1) for place in range(count)]
    if kind == "string":
        return _string(schema, number)
    if kind == "integer":
        return int(_between(schema, number, 1))
    if kind == "number":
        return _between(schema, number, 0.5)
    return bool(number % 2) if kind == "boolean" else None


def _object(schema: dict[str, Any], number: int, root: Any, depth: int) -> dict[str, Any]:
    required = schema.get("required") or ()
    return {
        name: _draw(inner, text.mixed(number, *name.encode()), root, depth + 1)
        for name, inner in (schema.get("properties") or {}).items()
        if depth < OPTIONAL_DEPTH or name in required
    }


def _string(schema: dict[str, Any], number: int) -> str:
    if schema.get("format") in FORMATS:
        return FORMATS[schema["format"]]
    said = " ".join(text.words(number % len(text.WORDS), 1 + number % MOST_WORDS))
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    return said.ljust(least, ".")[:most]


def _between(schema: dict[str, Any], number: int, step: float) -> float:
    """A multiple of *step* within the bounds of *schema*, at most a hundred steps above the lower one."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    if high is None and "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    if low is None:
        low = 0 if high is None or high >= 0 else high
    steps = 100 if high is None else max(0, min(100, int((high - low) / step)))
    return float(low + step * (number % (steps + 1)))


def _referred(reference: str, root: Any) -> Any:
    """What `#/…` in *root* names; None if there is nothing."""
    value = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def _merged(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """The parts of `allOf` as one schema."""
    whole = {name: value for name, value in schema.items() if name != "allOf"}
    for given in schema["allOf"]:
        refers = isinstance(given, dict) and isinstance(given.get("$ref"), str)
        part = _referred(given["$ref"], root) if refers else given
        for name, value in part.items() if isinstance(part, dict) else ():
            if name == "properties":
                whole[name] = {**whole.get(name, {}), **value}
            elif name == "required":
                whole[name] = [*whole.get(name, []), *value]
            else:
                whole.setdefault(name, value)
    return whole
