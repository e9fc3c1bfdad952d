"""What-ifs, with the nightly replay of the ledger among them."""

from django.db.models import QuerySet

from controlplane.accounts.models import Role
from controlplane.resources.filters import Hidden
from controlplane.resources.resource import Column, Filter, Resource
from controlplane.rows import Instant
from controlplane.simulation.whatif.models import WhatIf, WhatIfState
from controlplane.simulation.whatif.selectors import what_ifs


def by_replays(rows: QuerySet[WhatIf], shown: str) -> QuerySet[WhatIf]:
    """Leave out the nightly replays but the newest, unless all are *shown*."""
    if shown == "all":
        return rows
    newest = WhatIf.objects.filter(nightly=True).order_by("-pk").values("pk")[:1]
    return rows.exclude(pk__in=WhatIf.objects.filter(nightly=True).exclude(pk__in=newest).values("pk"))


WHAT_IFS = Resource(
    name="what-ifs",
    noun="what-if",
    title="What-if",
    model=WhatIf,
    rows=lambda viewer: what_ifs(),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("title", "Question"),
        Column("state", "State", type=WhatIfState),
        Column("futures", "Futures", "futures_count", rest=False),
        Column("seeds", "Repetitions", draw="count"),
        Column("horizon_s", "Covers (s)", draw="duration"),
        Column("warmup_s", "Not counted (s)"),
        Column("created_at", "Asked (UTC)"),
        Column("submitted_at"),
        Column("started_at", "Started (UTC)"),
        Column("ended_at", "Ended (UTC)"),
        Column(
            "requested_by",
            "By",
            lambda row: row.requested_by.get_username() if row.requested_by else None,
            type=str | None,
            about="Null once the user is deleted, and for replays of the ledger.",
        ),
        Column("nightly", "Replay of the ledger"),
        Column("became", "Plan", lambda row: row.plan.get("letter", ""), rest=False),
    ),
    filters=(
        Filter("state", type=WhatIfState),
        Filter("since", "created_at__gte", Instant),
        Filter("nightly", type=bool),
        Filter("replays", by_replays, rest=False, control=Hidden("replays", ("newest", "all"), "newest")),
    ),
    page=("title", "state", "futures", "seeds", "horizon_s", "created_at", "requested_by", "became"),
    caption="Newest first. Each takes the fleet as it is and serves the same requests in several futures",
    template="console/what_if/list.html",
    row_template="console/what_if/list_row.html",
)
