"""Where names of points stand in a chart, so that they cover neither points nor each other."""

from collections.abc import Sequence

# Where the name of a point may stand, best first: its left edge and middle from the point, by its width, in pixels.
SIDES = {
    "top center": (-0.5, 0, -15),
    "bottom center": (-0.5, 0, 15),
    "middle right": (0, 10, 0),
    "middle left": (-1, -10, 0),
    "top right": (0, 4, -13),
    "bottom right": (0, 4, 13),
    "top left": (-1, -4, -13),
    "bottom left": (-1, -4, 13),
}
DRAWN_PX = (460.0, 200.0)  # about the size of the plot's ground on a desktop
LETTER_PX, LINE_PX, POINT_PX = 6.3, 14.0, 12.0

Box = tuple[float, float, float, float]  # left, top, right, bottom


def label_sides(
    points: Sequence[tuple[str, str, float, float]], across: Sequence[float], up: Sequence[float]
) -> dict[str, str]:
    """For each (key, text, x, y): the side of its point on which the text covers least of other points and texts."""
    places = {
        key: (
            (x - across[0]) / (across[1] - across[0]) * DRAWN_PX[0],
            (up[1] - y) / (up[1] - up[0]) * DRAWN_PX[1],
        )
        for key, _, x, y in points
    }
    half = POINT_PX / 2
    taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in places.values()]
    sides = {}
    for key, text, _, _ in sorted(points, key=lambda point: (point[2], point[3])):
        boxes = {side: box(places[key], side, len(text) * LETTER_PX) for side in SIDES}
        best = min(boxes, key=lambda side: sum(overlap(boxes[side], other) for other in taken))
        sides[key] = best
        taken.append(boxes[best])
    return sides


def box(place: tuple[float, float], side: str, width: float) -> Box:
    """What a text of *width* pixels covers on that *side* of the point at *place*."""
    share, right, down = SIDES[side]
    left, middle = place[0] + share * width + right, place[1] + down
    return left, middle - LINE_PX / 2, left + width, middle + LINE_PX / 2


def overlap(one: Box, other: Box) -> float:
    """Square pixels that both cover."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
