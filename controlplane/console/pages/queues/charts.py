"""Waits as they were predicted when requests came, against what those then waited."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from django.utils import timezone

from controlplane.console.charts.spec import NUMBERS, POINT_SHAPES, Chart, Series, axis_title, diagonal, styles
from controlplane.console.formats import NONE, count
from controlplane.resources.tables import Columns, table

Row = dict[str, Any]
DRAWN = 600
EMPTY = "No request that waited ended in the last hour. A wait is estimated as a request comes, and compared later."
POINTS: Columns = {
    "At": lambda point: timezone.localtime(point["arrived_at"]),
    "Model": "model",
    "Place in its queue": "position",
    "Predicted wait (s)": "estimated_wait_s",
    "99th percentile (s)": "estimated_wait_p99_s",
    "Waited (s)": "waited_s",
}


def calibration(points: Sequence[Row], calibrated: Sequence[Row]) -> Chart:
    """One point a request; on the dashed line the prediction was right."""
    by_model: dict[str, list[Row]] = defaultdict(list)
    for point in points[:DRAWN]:
        by_model[point["model"]].append(point)
    most = max((max(point["estimated_wait_s"], point["waited_s"]) for point in points[:DRAWN]), default=1.0)
    axis = NUMBERS.but(unit="s", rangemode="tozero", ticksuffix=" s", hoverformat=".1f", showgrid=True)
    series = [
        Series(
            name,
            [round(point["waited_s"], 2) for point in by_model[name]],
            (color, "solid"),
            [round(point["estimated_wait_s"], 2) for point in by_model[name]],
            shape=POINT_SHAPES[at % len(POINT_SHAPES)],
            size=6,
            more={
                "marker": {"opacity": 0.55},
                "hovertemplate": f"predicted %{{x:.1f}} s, waited %{{y:.1f}} s<br>{name}<extra></extra>",
            },
        )
        for at, (name, (color, _)) in enumerate(styles(sorted(by_model)).items())
    ]
    fits = "; ".join(f"{row['model']}: R2 {r2(row)}, n {count(row['requests'])}" for row in calibrated)
    return Chart(
        key="waits",
        title="Wait, predicted and actual",
        caption=f"Last hour, {count(len(points))} requests" if points else "",
        sentence=f"Predicted against actual waits of {count(len(points))} requests. {fits}. "
        "A prediction leaves out who comes later and goes first: under overload, classes that others overtake wait longer.",
        across=axis.but(title=axis_title("predicted wait")),
        up=axis.but(title=axis_title("actual wait")),
        series=[*series, diagonal(0.0, most)],
        table=table(POINTS, points),
        empty="" if points else EMPTY,
        size="medium",
        hover="closest",
    )


def r2(row: Row) -> str:
    """Below 0 estimates are worse than one number for all waits; the exact value says no more."""
    if row["r2"] is None:
        return NONE
    return "below 0" if row["r2"] < 0 else f"{row['r2']:.2f}"
