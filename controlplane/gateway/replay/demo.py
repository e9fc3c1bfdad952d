"""What the demo's traffic is sent to, and the generated past that stands before it."""

import time
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.replay.past import minutes
from controlplane.gateway.replay.waves import KINDS, Stream, streams

TENANT = "acme"
PAST_HOURS = 12.0  # 90 days of the demo's traffic, in a second or two
ADDED, REMOVED = "demo.past_generated", "demo.past_removed"
BATCH_ROWS = 5_000


def streams_to(tenant: Tenant, secret: str = "") -> list[Stream]:
    """Every stream that *tenant* sends to the active deployments, with the API key *secret*."""
    deployments = Deployment.objects.filter(active=True).select_related("model", "region")
    endpoints = {(row.model.name, row.region.name, row.model.context_tokens) for row in deployments}
    allowed = {*tenant.slo_classes.values_list("name", flat=True), tenant.default_slo_class.name}
    return streams(endpoints, {name: secret for name in KINDS if name in allowed}, settings.DEMO_DAY_S)


@transaction.atomic
def generate_past(now: datetime, hours: float = PAST_HOURS) -> int:
    """Give a fleet that has counted nothing yet *hours* of minutes before *now*; returns the rows.

    Once only: not beside rows that were counted, nor again after it was removed.
    """
    if MinuteRow.objects.exists() or Event.objects.filter(kind=ADDED).exists():
        return 0
    tenant = Tenant.objects.filter(name=TENANT, active=True).first()
    count = round(hours * 60)
    if tenant is None or count < 1:
        return 0
    began_s = time.monotonic()
    end = now.replace(second=0, microsecond=0)
    rows = MinuteRow.objects.bulk_create(
        minutes(streams_to(tenant), end - timedelta(minutes=count), count, seed=0), batch_size=BATCH_ROWS
    )
    after = {
        "rows": len(rows),
        "hours": hours,
        "until": end.isoformat(),
        "took_s": round(time.monotonic() - began_s, 2),
    }
    record(ADDED, actor="seed_demo", after=after, reason="so that forecasts and plans are there at first sight")
    return len(rows)


@transaction.atomic
def remove_past() -> int:
    """Delete the generated minutes; returns how many. What was counted stays."""
    count, _ = MinuteRow.objects.filter(generated=True).delete()
    if count:
        record(REMOVED, actor="seed_demo", before={"rows": count})
    return count
