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
Place = tuple[float, float]


def labels_of(
    points: Sequence[tuple[str, Sequence[str], float, float]],
    across: Sequence[float],
    up: Sequence[float],
    *,
    sides: Sequence[str] = tuple(SIDES),
    grounds_px: Sequence[tuple[float, float]] = GROUNDS_PX,
) -> dict[str, tuple[str, str]]:
    """Return for each (key, texts, x, y) a text and the side of its point where it covers least, of the axes' ranges.

    The text is the first that fits without covering a point or a text, else the last one.
    """
    half = POINT_PX / 2
    grounds = []
    for ground in grounds_px:
        places = {key: place_of((x, y), across, up, ground) for key, _, x, y in points}
        taken: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in places.values()]
        grounds.append((ground, places, taken))
    labels = {}
    for key, texts, _, _ in sorted(points, key=lambda point: (point[2], point[3])):
        for text in texts:
            boxes = {
                side: [
                    (box(places[key], side, len(text) * LETTER_PX), ground, taken) for ground, places, taken in grounds
                ]
                for side in sides
            }
            covered = {
                side: sum(
                    outside(one, ground) + sum(overlap(one, other) for other in taken) for one, ground, taken in each
                )
                for side, each in boxes.items()
            }
            side = min(covered, key=covered.__getitem__)
            if not covered[side]:
                break
        labels[key] = text, side
        for one, _, taken in boxes[side]:
            taken.append(one)
    return labels


def place_of(point: Place, across: Sequence[float], up: Sequence[float], ground: tuple[float, float]) -> Place:
    """Return the pixels of *point* from the top left of *ground*; the middle on an axis without extent."""
    x, y = (
        (value - low) / (high - low) if high > low else 0.5
        for value, (low, high) in zip(point, (across, up), strict=True)
    )
    return ground[0] * x, ground[1] * (1 - y)


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


def outside(one: Box, ground: tuple[float, float]) -> float:
    """Return the area beyond *ground* in square pixels."""
    return (one[2] - one[0]) * (one[3] - one[1]) - overlap(one, (0.0, 0.0, *ground))
