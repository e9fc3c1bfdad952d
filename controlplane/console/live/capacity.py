"""A capacity plan that is being answered, as its page keeps it fresh."""

from typing import Any

from django.utils.html import format_html

from controlplane.planning.models import CapacityPlan, CapacityState


def html(number: int) -> dict[str, str]:
    row = CapacityPlan.objects.filter(pk=number).values_list("state", "phase", "progress").first()
    return {"capacity": bar(*row)} if row and row[0] in (CapacityState.QUEUED, CapacityState.RUNNING) else {}


def bar(state: str, phase: str, done: float) -> str:
    return format_html(
        '<progress class="progress" max="1" value="{}" aria-label="Check by simulation"></progress><small>{}</small>',
        round(done, 2),
        phase or "Waits for a worker",
    )


def drawn(number: int) -> Any:
    """Return what the page is made of: the state, and whether there is a first answer."""
    return CapacityPlan.objects.filter(pk=number).values_list("state", "answer__first_s").first()
