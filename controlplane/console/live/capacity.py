"""A capacity plan that is being answered, as its page keeps it fresh."""

from typing import Any

from django.utils.html import format_html

from controlplane.planning.models import CapacityPlan, CapacityState

UNDER_WAY = CapacityPlan.objects.filter(state__in=(CapacityState.QUEUED, CapacityState.RUNNING))


def html(number: int) -> dict[str, str]:
    row = UNDER_WAY.filter(pk=number).values_list("progress", "phase").first()
    bar = '<progress class="progress" max="1" value="{}" aria-label="Check by simulation"></progress><small>{}</small>'
    return {"capacity": format_html(bar, round(row[0], 2), row[1] or "Waits for a worker")} if row else {}


def unanswered(topics: set[str]) -> bool:
    """Return whether a page waits for the first answer to its question."""
    asked = [int(topic.removeprefix("capacity:")) for topic in topics if topic.startswith("capacity:")]
    return bool(asked) and UNDER_WAY.filter(pk__in=asked, answer={}).exists()


def drawn(number: int) -> Any:
    """Return what the page is made of: the state, and whether there is a first answer."""
    return CapacityPlan.objects.filter(pk=number).values_list("state", "answer__first_s").first()
