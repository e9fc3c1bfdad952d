"""Plots of kept results in the documentation, as SVG: `python -m tests.docs.plots` draws them again from `docs/results`.

Each is a row of panels, one for each model, with a line for each strategy over the day.
"""

import json
import sys
from html import escape
from typing import Final

from controlplane.experiments.experiment import Row
from controlplane.experiments.sageserve_mixed import SAMPLE_S
from tests.docs.results import KEPT

COLOURS: Final = ("#6e7781", "#0969da", "#bf8700", "#1a7f37")
WIDTH, HEIGHT, LEFT, TOP, GAP = 210, 120, 34, 46, 30
PLOTS: Final = {
    "pools-memory": ("sageserve-mixed-pools", "pools", "kv_use_course", "Use of KV memory in us-west (figure 6)"),
    "pools-instances": ("sageserve-mixed-pools", "pools", "ready_course", "Ready instances in us-west (figure 5)"),
}
"""Kept result, its part, series and title, by name of the file."""


def draw(name: str) -> str:
    """Return the plot *name* as SVG."""
    kept, part, series, title = PLOTS[name]
    result = json.loads((KEPT / f"{kept}.json").read_text())["result"]
    rows: list[Row] = result[part]
    whole = LEFT + len(result["models"]) * (WIDTH + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {TOP + HEIGHT + 40}" font-family="sans-serif"'
        f' font-size="11" role="img"><title>{escape(title)}</title>',
        f'<rect width="{whole}" height="{TOP + HEIGHT + 40}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="16" font-size="13" fill="#1f2328">{escape(title)}</text>',
    ]
    for at, row in enumerate(rows):
        x = LEFT + 200 * at
        lines.append(
            f'<line x1="{x}" y1="{TOP + HEIGHT + 30}" x2="{x + 18}" y2="{TOP + HEIGHT + 30}" stroke="{COLOURS[at]}"'
            f' stroke-width="2"/><text x="{x + 24}" y="{TOP + HEIGHT + 34}" fill="#1f2328">{escape(row["strategy"])}</text>'
        )
    for at, model in enumerate(result["models"]):
        most = max(max(row["series"][series][model]) for row in rows) or 1.0
        lines += _panel(LEFT + at * (WIDTH + GAP), model, most, [row["series"][series][model] for row in rows])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(x: int, model: str, most: float, courses: list[list[float]]) -> list[str]:
    top = f"{100 * most:.2g}%" if most <= 1 else f"{most:g}"
    lines = [
        f'<text x="{x}" y="{TOP - 10}" fill="#1f2328">{escape(model)}</text>',
        f'<rect x="{x}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#d0d7de"/>',
        f'<text x="{x - 4}" y="{TOP + 9}" text-anchor="end" fill="#59636e">{top}</text>',
        f'<text x="{x - 4}" y="{TOP + HEIGHT}" text-anchor="end" fill="#59636e">0</text>',
    ]
    for hour in (6, 12, 18):
        at = x + WIDTH * hour / 24
        lines.append(
            f'<text x="{at:g}" y="{TOP + HEIGHT + 13}" text-anchor="middle" fill="#59636e">{hour}:00</text>'
            f'<line x1="{at:g}" y1="{TOP}" x2="{at:g}" y2="{TOP + HEIGHT}" stroke="#eaeef2"/>'
        )
    for number, course in enumerate(courses):
        points = " ".join(
            f"{x + WIDTH * step * SAMPLE_S / 86_400:.1f},{TOP + HEIGHT * (1 - value / most):.1f}"
            for step, value in enumerate(course)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="1.5"/>')
    return lines


def main() -> None:
    for name in PLOTS:
        (KEPT / f"{name}.svg").write_text(draw(name))


if __name__ == "__main__":
    sys.exit(main())
