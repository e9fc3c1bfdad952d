"""Labels of futures in the chart of cost against SLO met: none covers another."""

from itertools import combinations

import pytest

from controlplane.console.pages.what_if import charts
from controlplane.console.pages.what_if.charts import labels_of

NAMES = {
    "A": "As now", "B": "QLM", "C": "Reactive", "D": "More instances", "E": "SageServe LT-UA", "F": "Other fleet",
}  # fmt: skip
ACROSS, UP = (100.0, 200.0), (90.0, 100.0)


def of(**points):
    return labels_of(points, NAMES, ACROSS, UP)


def boxes(points):
    made = labels_of(points, NAMES, ACROSS, UP)
    return [
        charts._box(charts._px(points[letter], ACROSS, UP), label.text, label.position)
        for letter, label in made.items()
        if label.text
    ]


def test_a_point_by_itself_has_its_name_to_the_right():
    assert of(A=(120, 95), B=(150, 98)) == {"A": ("A As now", "middle right"), "B": ("B QLM", "middle right")}


def test_points_at_one_place_share_a_label():
    made = of(A=(150, 95), B=(150, 95), C=(151, 95.1), D=(120, 99))
    assert [made[letter].text for letter in "ABCD"] == ["A, B, C", "", "", "D More instances"]


def test_a_label_goes_where_there_is_room():
    made = of(A=(150, 95), B=(160, 95))
    assert made["A"] == ("A As now", "middle left")
    assert made["B"] == ("B QLM", "middle right")
    at_the_edge = of(A=(199, 95))["A"]
    assert at_the_edge.position == "middle left"


@pytest.mark.parametrize(
    "points",
    [
        {letter: (150 + 4 * at, 95) for at, letter in enumerate("ABCDEF")},
        {letter: (150, 95 + 0.6 * at) for at, letter in enumerate("ABCDEF")},
        {letter: (150 + 5 * at, 95 + 0.4 * at) for at, letter in enumerate("ABCDEF")},
    ],
)
def test_none_covers_another(points):
    for one, other in combinations(boxes(points), 2):
        assert not one.covers(other)


def test_one_future_alone_is_drawn_in_the_middle():
    assert labels_of({"A": (1.0, 99.0)}, NAMES, (1.0, 1.0), UP)["A"].text == "A As now"
