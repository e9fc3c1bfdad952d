from scheduling.simulation.measures.tables import Table


def test_csv(tmp_path) -> None:
    table = Table(("by", "group", "value"), [("model", "a", 1), ("model", 'b "x", y', None)])
    table.write_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == 'by,group,value\nmodel,a,1\nmodel,"b ""x"", y",\n'
