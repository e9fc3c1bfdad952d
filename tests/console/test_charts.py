"""Charts and tables from their declarations: figure, legend, table and file agree."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

from controlplane.console.charts.spec import MILLISECONDS, Chart, Levels, Series
from controlplane.resources.tables import table, value

TIMES = [datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(seconds=5 * at) for at in range(3)]


def chart(**changes):
    series = [Series("p50", [1.0, None, 3.0], layer=1), Series("p95", [20.0, 30.0, 40.0], shape="circle", size=6)]
    declared = {"x": TIMES, "up": MILLISECONDS, "series": series, "levels": Levels("SLO", [25.0])}
    return Chart("ttft", "TTFT", "", "TTFT: 40 ms.", **{**declared, **changes})


def test_the_table_has_the_axis_and_the_series_with_their_unit():
    assert chart().header == ("Time", "p50 (ms)", "p95 (ms)")
    assert chart().rows == [[TIMES[0], 1.0, 20.0], [TIMES[1], None, 30.0], [TIMES[2], 3.0, 40.0]]
    assert chart().shown_rows[0] == ["12:00:10", "3.000", "40.0"]  # the newest first
    text = b"".join(chart().csv("ttft").streaming_content).decode()
    assert text.splitlines()[:2] == ["Time (UTC),p50 (ms),p95 (ms)", "2026-01-01T12:00:00Z,1,20"]


def test_the_legend_keeps_the_order_of_declaration_and_the_figure_that_of_layers():
    assert [entry.label for entry in chart().legend] == ["p50", "p95", "SLO"]
    assert [trace["name"] for trace in chart().figure["data"]] == ["p95", "p50"]
    assert [trace["mode"] for trace in chart().figure["data"]] == ["markers", "lines"]
    (level,) = chart().figure["layout"]["shapes"]
    assert (level["y0"], level["y1"]) == (0.025, 0.025)  # drawn in seconds


def test_axes_are_laid_over_those_of_every_chart():
    axis = chart(up=MILLISECONDS.but(range=[0, 50], rangemode=None)).figure["layout"]["yaxis"]
    assert (axis["ticksuffix"], axis["range"], axis["gridcolor"]) == ("s", [0, 50], "var(--grid)")
    assert "rangemode" not in axis
    assert chart().figure["layout"]["yaxis"]["rangemode"] == "tozero"


def test_an_empty_chart_says_why_and_draws_nothing():
    empty = chart(empty="No traffic in this range.")
    assert (empty.figure, empty.legend) == (None, ())
    assert empty.payload() == {"figure": None, "sentence": "TTFT: 40 ms.", "empty": "No traffic in this range."}


def test_columns_are_paths_or_functions():
    row = {"cell": SimpleNamespace(present=2), "key": None}
    columns = {"Present": "cell.present", "Key": "key.prefix", "Twice": lambda row: 2 * row["cell"].present, "No": "no"}
    shown = table(columns, [row])
    assert shown.header == ("Present", "Key", "Twice", "No")
    assert shown.rows == [[2, None, 4, None]]
    assert value(row, "cell.present") == 2
