"""A scenario that is written as TOML is read back as it was."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.scenario.toml_text import to_toml
from tests.scheduling.simulation.test_scenario import RIGHT

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)
TABLES = st.dictionaries(TEXT, VALUES, max_size=3)


def test_a_scenario_is_read_back() -> None:
    values = tomllib.loads(RIGHT)
    assert tomllib.loads(to_toml(values)) == values


@given(st.dictionaries(TEXT, SCALARS | TABLES | st.lists(TABLES, min_size=1, max_size=3), max_size=4))
def test_any_tables_are_read_back(values: dict) -> None:
    assert tomllib.loads(to_toml(values)) == values
