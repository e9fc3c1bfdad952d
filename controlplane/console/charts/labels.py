"""Placement of point labels in a chart without covering points or other labels."""

from collections.abc import Sequence

# Label positions, best first: left edge and middle relative to the point, by label width, in pixels.
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
GROUNDS_PX = ((460.0, 200.0), (272.0, 200.0))
"""Approximate plot areas on desktop and phone; a label has the same side in both."""
LETTER_PX, LINE_PX, POINT_PX = 6.3, 14.0, 12.0

Box = tuple[float, float, float, float]  # left, top, right, bottom


def label_sides(
    points: Sequence[tuple[str, str, float, float]], across: Sequence[float], up: Sequence[float]
) -> dict[str, str]:
    """Return for each (key, text, x, y) the side of its point where the text covers least of other points and texts."""
    half = POINT_PX / 2
    grounds = []
    for width, height in GROUNDS_PX:
        places = {
            key: ((x - across[0]) / (across[1] - across[0]) * width, (up[1] - y) / (up[1] - up[0]) * height)
            for key, _, x, y in points
        }
        taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in places.values()]
        grounds.append((places, taken))
    sides = {}
    for key, text, _, _ in sorted(points, key=lambda point: (point[2], point[3])):
        covered = {
            side: sum(
                overlap(box(places[key], side, len(text) * LETTER_PX), other)
                for places, taken in grounds
                for other in taken
            )
            for side in SIDES
        }
        sides[key] = min(covered, key=covered.__getitem__)
        for places, taken in grounds:
            taken.append(box(places[key], sides[key], len(text) * LETTER_PX))
    return sides


def box(place: tuple[float, float], side: str, width: float) -> Box:
    """Return the area covered by a text of *width* pixels on that *side* of the point at *place*."""
    share, right, down = SIDES[side]
    left, middle = place[0] + share * width + right, place[1] + down
    return left, middle - LINE_PX / 2, left + width, middle + LINE_PX / 2


def overlap(one: Box, other: Box) -> float:
    """Return the overlap in square pixels."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
