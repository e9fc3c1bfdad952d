"""Labels of points that do not cover each other: points at one place share a label, the others take a free side."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

WIDTH, HEIGHT = 330.0, 230.0
"""Of the drawing, px: about what a third of the page has; a larger one has more room between labels."""
LETTER_PX, LINE_PX, POINT_PX = 6.2, 14.0, 14.0
GAP_PX = 4.0
"""Between a point and its label."""
SAME_PX: Final = 11.0
"""Points whose centres are nearer than this are drawn as one."""
POSITIONS: Final = ("middle right", "middle left", "top center", "bottom center")


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def covers(self, other: "Box") -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    @property
    def inside(self) -> bool:
        return self.left >= 0 and self.top >= 0 and self.right <= WIDTH and self.bottom <= HEIGHT


class Label(NamedTuple):
    """*text* is empty for a point that an earlier one speaks for."""

    text: str
    position: str


def labels_of(
    points: Mapping[str, tuple[float, float]],
    names: Mapping[str, str],
    across: tuple[float, float],
    up: tuple[float, float],
) -> dict[str, Label]:
    """A label for each of *points* (by letter), whose axes reach over *across* and *up*.

    It says the letter and its name where there is room, else the letter alone. Letters of points at one place are joined.
    """
    placed = {letter: _px(point, across, up) for letter, point in points.items()}
    groups = _groups(placed)
    taken = [_around(placed[group[0]]) for group in groups]
    made = dict.fromkeys(points, Label("", POSITIONS[0]))
    for number, group in enumerate(groups):
        letters = ", ".join(group)
        texts = [f"{group[0]} {names[group[0]]}", letters] if len(group) == 1 else [letters]
        others = taken[:number] + taken[number + 1 :]
        choices = [(text, position) for text in texts for position in POSITIONS]
        boxes = [_box(placed[group[0]], text, position) for text, position in choices]
        free = [at for at, box in enumerate(boxes) if box.inside and not any(map(box.covers, others))]
        at = free[0] if free else len(choices) - len(POSITIONS)
        made[group[0]] = Label(*choices[at])
        taken.append(boxes[at])
    return made


def _px(point: tuple[float, float], across: tuple[float, float], up: tuple[float, float]) -> tuple[float, float]:
    x, y = (
        (value - low) / (high - low) if high > low else 0.5
        for value, (low, high) in zip(point, (across, up), strict=True)
    )
    return WIDTH * x, HEIGHT * (1 - y)


def _groups(placed: Mapping[str, tuple[float, float]]) -> Sequence[list[str]]:
    """Letters whose points are drawn as one, in the order given."""
    groups: list[list[str]] = []
    for letter, (x, y) in placed.items():
        for group in groups:
            if any(abs(placed[each][0] - x) < SAME_PX and abs(placed[each][1] - y) < SAME_PX for each in group):
                group.append(letter)
                break
        else:
            groups.append([letter])
    return groups


def _around(point: tuple[float, float]) -> Box:
    x, y = point
    return Box(x - POINT_PX / 2, y - POINT_PX / 2, x + POINT_PX / 2, y + POINT_PX / 2)


def _box(point: tuple[float, float], text: str, position: str) -> Box:
    (x, y), width = point, LETTER_PX * len(text)
    away = POINT_PX / 2 + GAP_PX
    match position:
        case "middle right":
            return Box(x + away, y - LINE_PX / 2, x + away + width, y + LINE_PX / 2)
        case "middle left":
            return Box(x - away - width, y - LINE_PX / 2, x - away, y + LINE_PX / 2)
        case "top center":
            return Box(x - width / 2, y - away - LINE_PX, x + width / 2, y - away)
    return Box(x - width / 2, y + away, x + width / 2, y + away + LINE_PX)
