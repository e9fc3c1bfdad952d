"""Values drawn for a JSON schema: of its types, within its bounds, the same for the same number."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.emulator.content import example

NUMBERS = st.integers(0, 2**64 - 1)
NODE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
        }
    },
}


@given(NUMBERS, st.integers(-50, 50), st.integers(0, 300))
def test_numbers_are_within_their_bounds(number: int, low: int, span: int) -> None:
    bounds = {"minimum": low, "maximum": low + span}
    whole = example({"type": "integer", **bounds}, number)
    assert isinstance(whole, int)
    assert low <= whole <= low + span
    assert low <= example({"type": "number", **bounds}, number) <= low + span
    assert low < example({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + span + 2}, number)


@given(NUMBERS, st.integers(0, 30), st.integers(0, 30))
def test_texts_and_lists_have_the_lengths_asked_for(number: int, least: int, more: int) -> None:
    said = example({"type": "string", "minLength": least, "maxLength": least + more}, number)
    assert least <= len(said) <= least + more
    listed = example({"type": "array", "items": {"type": "boolean"}, "minItems": least}, number)
    assert len(listed) >= least
    assert all(isinstance(item, bool) for item in listed)


@given(NUMBERS)
def test_a_schema_that_refers_to_itself_ends(number: int) -> None:
    drawn = example(NODE, number)
    assert drawn == example(NODE, number)
    depth = 0
    while drawn is not None:
        assert isinstance(drawn["name"], str)
        drawn, depth = drawn.get("next"), depth + 1
    assert 1 < depth < 12


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"const": 4}, int),
        ({"enum": ["a"]}, str),
        ({"type": ["null", "string"]}, str),
        ({"type": "null"}, type(None)),
        ({"anyOf": [{"type": "boolean"}]}, bool),
        ({"type": "string", "format": "date"}, str),
        ({"properties": {"a": {"type": "string"}}}, dict),
        (True, type(None)),
    ],
)
def test_the_type_is_the_schema_s(schema: Any, kind: type) -> None:
    assert isinstance(example(schema, 7), kind)


def test_all_of_is_one_schema() -> None:
    parts = [{"properties": {"a": {"type": "integer"}}}, {"$ref": "#/$defs/b"}]
    schema = {"allOf": parts, "$defs": {"b": {"properties": {"b": {"enum": ["x"]}}}}}
    drawn = example(schema, 3)
    assert set(drawn) == {"a", "b"}
    assert drawn["b"] == "x"
