"""A what-if that runs, as its page keeps it fresh."""

from typing import Any

from django.utils.html import format_html

from controlplane.console.pages.what_if.compare import in_words, status
from controlplane.simulation.whatif import selectors

read = selectors.progress


def is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 19


def html(progress: dict[str, Any] | None) -> dict[str, str]:
    """Its fragments: the line of the whole, and the bar and line of each future."""
    if progress is None or progress["state"] != "running":
        return {}
    lines = {f"future/{one['letter']}": future(one) for one in progress["futures"]}
    return {"what-if": in_words(progress, None), **lines}


def future(one: dict[str, Any]) -> str:
    """Progress bar and line of one future."""
    return format_html(
        '<progress class="progress" max="1" value="{}" data-state="{}" aria-label="{}"></progress><small>{}</small>',
        one["done"],
        one["state"],
        one["name"],
        status(one),
    )


def drawn(progress: dict[str, Any] | None) -> Any:
    """Seeds that are done and states: what the page's tables and charts are made of."""
    if progress is None:
        return None
    return [(one["state"], one["seeds_done"]) for one in progress["futures"]], progress["state"], progress["runs_done"]
