from pathlib import Path

import pytest

from scheduling.simulation.measures.tables import Table


def table() -> Table:
    made = Table(("by", "group", "value"))
    made.add("model", "a", 1)
    made.add("model", 'b "x", y', None)
    return made


def test_rows_and_values() -> None:
    assert table().value(group="a") == 1
    assert table().select(by="model").as_dicts()[0] == {"by": "model", "group": "a", "value": 1}
    with pytest.raises(LookupError, match="2 rows"):
        table().value(by="model")
    with pytest.raises(ValueError, match="1 values for 3 columns"):
        table().add("model")


def test_csv(tmp_path: Path) -> None:
    table().write_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == 'by,group,value\nmodel,a,1\nmodel,"b ""x"", y",\n'
