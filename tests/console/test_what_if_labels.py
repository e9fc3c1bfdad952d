"""Labels of futures in the chart of cost against SLO met: none covers another."""

from itertools import combinations

import pytest

from controlplane.console.charts.labels import LETTER_PX, box, overlap, place_of
from controlplane.console.pages.what_if.charts import GROUND_PX, future_labels

NAMES = {
    "A": "As now", "B": "QLM", "C": "Reactive", "D": "More instances", "E": "SageServe LT-UA", "F": "Other fleet",
}  # fmt: skip
ACROSS, UP = (100.0, 200.0), (90.0, 100.0)


def of(**points):
    return future_labels(points, NAMES, ACROSS, UP)


def boxes(points):
    return [
        box(place_of(points[letter], ACROSS, UP, GROUND_PX), side, len(text) * LETTER_PX)
        for letter, (text, side) in of(**points).items()
        if text
    ]


def test_a_point_by_itself_has_its_name_to_the_right():
    assert of(A=(120, 95), B=(150, 98)) == {"A": ("A As now", "middle right"), "B": ("B QLM", "middle right")}


def test_points_at_one_place_share_a_label():
    made = of(A=(150, 95), B=(150, 95), C=(151, 95.1), D=(120, 99))
    assert [made[letter][0] for letter in "ABCD"] == ["A, B, C", "", "", "D More instances"]


def test_a_label_goes_where_there_is_room():
    made = of(A=(150, 95), B=(160, 95))
    assert made["A"] == ("A As now", "middle left")
    assert made["B"] == ("B QLM", "middle right")
    assert of(A=(199, 95))["A"][1] == "middle left"


@pytest.mark.parametrize(
    "points",
    [
        {letter: (150 + 4 * at, 95) for at, letter in enumerate("ABCDEF")},
        {letter: (150, 95 + 0.6 * at) for at, letter in enumerate("ABCDEF")},
        {letter: (150 + 5 * at, 95 + 0.4 * at) for at, letter in enumerate("ABCDEF")},
    ],
)
def test_none_covers_another(points):
    assert [overlap(one, other) for one, other in combinations(boxes(points), 2) if overlap(one, other)] == []


def test_one_future_alone_is_drawn_in_the_middle():
    assert future_labels({"A": (1.0, 99.0)}, NAMES, (1.0, 1.0), UP)["A"][0] == "A As now"
