"""Admin of what-ifs: read, and cancelled."""

from django.contrib import admin

from controlplane.accounts.admin_actions import reason_action
from controlplane.accounts.models import User
from controlplane.events.admin import ReadOnlyAdmin
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import Future, FutureSeed, TraceFile, TwinError, WhatIf


def _cancel(row: WhatIf, user: User, reason: str) -> str:
    return f"What-if {row.pk} is {services.cancel(row, user, reason).state}"


@admin.register(WhatIf)
class WhatIfAdmin(ReadOnlyAdmin[WhatIf]):
    actions = [reason_action("cancel", "Cancel", "Cancel what-ifs", "Workers that run them stop.", _cancel)]
    list_display = ("id", "title", "state", "horizon_s", "seeds", "requested_by", "created_at", "ended_at")
    list_filter = ("state", "nightly")
    search_fields = ("title",)
    exclude = ("start",)


@admin.register(Future)
class FutureAdmin(ReadOnlyAdmin[Future]):
    list_display = ("id", "what_if", "letter", "name")
    list_filter = ("letter",)
    list_select_related = ("what_if",)
    search_fields = ("name", "what_if__title")


@admin.register(FutureSeed)
class FutureSeedAdmin(ReadOnlyAdmin[FutureSeed]):
    list_display = ("id", "future", "seed", "state", "phase", "progress", "attempts", "started_at", "ended_at")
    list_filter = ("state", "phase")
    list_select_related = ("future__what_if",)
    search_fields = ("error", "future__what_if__title")
    exclude = ("curves", "log")


@admin.register(TraceFile)
class TraceFileAdmin(ReadOnlyAdmin[TraceFile]):
    list_display = ("id", "name", "format", "requests", "span_s", "uploaded_by", "uploaded_at")
    list_filter = ("format",)
    search_fields = ("name",)
    exclude = ("content",)


@admin.register(TwinError)
class TwinErrorAdmin(ReadOnlyAdmin[TwinError]):
    list_display = ("made_at", "model", "gpu", "to_at", "requests", "measured", "simulated")
    list_filter = ("made_at", "model", "gpu")
