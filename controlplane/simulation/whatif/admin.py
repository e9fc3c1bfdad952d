"""Admin of what-ifs: read, and cancelled."""

from controlplane.resources.admin import show
from controlplane.resources.resource import Operation
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import Future, FutureSeed, TraceFile, TwinError, WhatIf

show(
    WhatIf,
    *("id", "title", "state", "horizon_s", "seeds", "requested_by", "created_at", "ended_at"),
    search=("title",),
    exclude=("start",),
    operations=[Operation("cancel", services.cancel, "Workers that run them stop.")],
)
show(Future, "id", "what_if", "letter", "name", search=("name", "what_if__title"))
show(
    FutureSeed,
    *("id", "future", "seed", "state", "phase", "progress", "attempts", "started_at", "ended_at"),
    search=("error", "future__what_if__title"),
    exclude=("curves",),
    related=("future__what_if",),
)
show(
    TraceFile,
    *("id", "name", "format", "requests", "span_s", "uploaded_by", "uploaded_at"),
    search=("name",),
    exclude=("content",),
)
show(TwinError, "made_at", "model", "gpu", "to_at", "requests", "measured", "simulated")
