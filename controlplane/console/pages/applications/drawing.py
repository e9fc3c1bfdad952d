"""Drawing of a demand graph: positions of SVG shapes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from controlplane.applications.selectors import UnitSummary
from scheduling.applications.demand_graph import START, DemandGraph

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 160, 62, 52, 28, 14
BAR = WIDTH - 24
"""Width of a bar that is the whole service of a run."""
EMPTY: Mapping[str, int] = MappingProxyType({})
MAX_UNITS = 40
"""Units drawn; the table has the others."""
MAX_DOTS = 5
MIN_SHARE = 0.02
"""Branches seldom taken are left out of the drawing."""


@dataclass(frozen=True)
class Edge:
    before: str
    """Empty for the start of a run."""
    after: str
    share: float


@dataclass(frozen=True)
class Box:
    name: str
    x: int
    y: int
    about: str = ""
    """Its backend."""
    part: str = "decode"
    """What its bar is drawn as: `timeline.PARTS`."""
    share: float = 0.0
    """Of the service of all runs."""
    calls: str = ""
    """How many at once, where that is not always one."""
    runs: int = 0
    """Running runs whose last ended call was of it."""

    @property
    def dots(self) -> list[int]:
        """Return where the dots of its runs stand, on its lower edge; beyond `MAX_DOTS` the count says how many."""
        return [self.x + 12 + 11 * at for at in range(min(self.runs, MAX_DOTS))]

    @property
    def dot_y(self) -> int:
        return self.y + HEIGHT

    @property
    def text_x(self) -> int:
        return self.x + 12

    @property
    def right_x(self) -> int:
        return self.x + WIDTH - 12

    @property
    def pill(self) -> tuple[int, int, int, int, int]:
        """Return x, y and width of what says the calls at once, on its upper edge, and where the text stands."""
        width = 22 + 6 * len(self.calls)
        x = self.x + WIDTH - width - 6
        return x, self.y - 9, width, x + width // 2, self.y + 4

    @property
    def ys(self) -> tuple[int, int, int]:
        """Return the base lines of its name and backend, and the top of its bar."""
        return self.y + 21, self.y + 39, self.y + 48

    @property
    def bar(self) -> float:
        return round(BAR * self.share, 1)


@dataclass(frozen=True)
class Line:
    path: str
    width: float
    label: str
    label_x: int
    label_y: int
    loops: bool


@dataclass(frozen=True)
class Drawing:
    width: int
    height: int
    boxes: list[Box]
    lines: list[Line]
    left_out: int
    box_width: int = WIDTH
    box_height: int = HEIGHT
    bar_width: int = BAR


def edges_of(graph: DemandGraph) -> list[Edge]:
    """Return edges with the probability that an execution of the first unit leads to the second, likely ones first."""
    shares = graph.branch_probabilities() if graph.records else {}
    edges = [Edge(before, after, share) for (before, after), share in shares.items()]
    return sorted(edges, key=lambda edge: (list(graph.units).index(edge.before) if edge.before else -1, -edge.share))


def _layers(names: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Return the layer of each unit: the longest path to it from the start, without the edges that lead back."""
    layer: dict[str, int] = {}

    def visit(name: str, depth: int, path: frozenset[str]) -> None:
        if name in path or depth <= layer.get(name, -1):
            return
        layer[name] = depth
        for edge in edges:
            if edge.before == name and edge.after not in path:
                visit(edge.after, depth + 1, path | {name})

    for edge in edges:
        if edge.before == START:
            visit(edge.after, 0, frozenset())
    last = max(layer.values(), default=-1)
    return {name: layer.get(name, last + 1) for name in names}


def _at_once(graph: DemandGraph) -> dict[str, str]:
    """Return how many calls of each unit are made at once, of those that are not always one."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for record in graph.records:
        for step in record.steps:
            least[step.unit] = min(step.parallelism, least.get(step.unit, step.parallelism))
            most[step.unit] = max(step.parallelism, most.get(step.unit, 1))
    return {
        unit: str(high) if least[unit] == high else f"{least[unit]} to {high}"
        for unit, high in most.items()
        if high > 1
    }


def layout(graph: DemandGraph, units: Sequence[UnitSummary], runs_at: Mapping[str, int] = EMPTY) -> Drawing:
    """Return the drawing of *graph* with its *units*: layers from left to right, loops below the boxes,
    and a dot for each running run at the unit of its last ended call (*runs_at*).
    """
    by_name, at_once = {unit.name: unit for unit in units}, _at_once(graph)
    names = list(graph.units)[:MAX_UNITS]
    edges = [edge for edge in edges_of(graph) if edge.share >= MIN_SHARE and edge.after in names]
    layer, rows, boxes = _layers(names, edges), dict[int, int](), dict[str, Box]()
    for name in sorted(names, key=lambda one: layer[one]):
        row = rows.get(layer[name], 0)
        rows[layer[name]] = row + 1
        unit = by_name[name]
        boxes[name] = Box(
            name,
            MARGIN + layer[name] * (WIDTH + GAP_X),
            MARGIN + row * (HEIGHT + GAP_Y),
            about=unit.backend if unit.kind == "llm" else " ".join(dict.fromkeys((unit.kind, unit.backend))),
            part="decode" if unit.kind == "llm" else unit.kind,
            share=unit.share,
            calls=at_once.get(name, ""),
            runs=runs_at.get(name, 0),
        )
    width = max(box.x for box in boxes.values()) + WIDTH + MARGIN
    height = max(box.y for box in boxes.values()) + HEIGHT + MARGIN + GAP_Y
    lines = [_line(boxes[edge.before], boxes[edge.after], edge.share) for edge in edges if edge.before in boxes]
    return Drawing(width, height, list(boxes.values()), lines, len(graph.units) - len(names))


def _line(before: Box, after: Box, share: float) -> Line:
    loops = after.x <= before.x
    if loops:
        x1, y1, x2, y2 = before.x + WIDTH // 2, before.y + HEIGHT, after.x + WIDTH // 3, after.y + HEIGHT
        low = max(y1, y2) + GAP_Y - 4
        x1, x2 = (x1 + 20, x2 - 20) if before == after else (x1, x2)
        path, label_x, label_y = f"M{x1} {y1} C{x1} {low} {x2} {low} {x2} {y2}", (x1 + x2) // 2, low
    else:
        x1, y1, x2, y2 = before.x + WIDTH, before.y + HEIGHT // 2, after.x, after.y + HEIGHT // 2
        middle = (x1 + x2) // 2
        path, label_x, label_y = f"M{x1} {y1} C{middle} {y1} {middle} {y2} {x2} {y2}", middle, (y1 + y2) // 2 - 5
    return Line(path, 1 + 4 * share, f"{share:.0%}" if share < 0.995 else "", label_x, label_y, loops)
