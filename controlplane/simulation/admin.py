"""Admin of simulations: read, and cancelled."""

from django.contrib import admin

from controlplane.accounts.admin_actions import reason_action
from controlplane.accounts.models import User
from controlplane.events.admin import ReadOnlyAdmin
from controlplane.simulation import requested
from controlplane.simulation.models import SimulationRun


def _cancel(row: SimulationRun, user: User, reason: str) -> str:
    return f"Simulation {row.pk} is {requested.cancel(row, user, reason).state}"


@admin.register(SimulationRun)
class SimulationRunAdmin(ReadOnlyAdmin[SimulationRun]):
    actions = [reason_action("cancel", "Cancel", "Cancel simulations", "Workers that run them stop.", _cancel)]
    list_display = ("id", "title", "state", "progress", "requested_by", "requested_at", "ended_at")
    list_filter = ("state",)
    search_fields = ("title", "error")
