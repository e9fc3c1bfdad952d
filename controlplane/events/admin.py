"""Admin of the event record."""

from controlplane.events.models import Event
from controlplane.resources.admin import show

show(
    Event,
    *("at", "severity", "kind", "subject", "actor", "reason"),
    search=("subject", "reason", "actor", "kind"),
)
