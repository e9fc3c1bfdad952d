"""What the demo's traffic is sent to, and the generated past that stands before it."""

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.fleet.models import Deployment
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.replay.past import minutes
from controlplane.gateway.replay.waves import JOB_EVERY_S, KINDS, Job, Stream, streams

SHARES = {
    "acme": {"interactive": 1.0, "non-interactive": 0.4},
    "globex": {"non-interactive": 0.6, "opportunistic": 1.0},
}
"""Who sends the demo's traffic: of each SLO class a share, which sum to one."""
JOBS = {"globex": ("bloom-176b", "opportunistic")}
"""Who sends jobs besides, to which model and in which SLO class: more at once than its instances run, so that some wait."""
JOB_FIRST_S = 40.0
PAST_HOURS = 12.0  # 90 days of the demo's traffic, in a second or two
ADDED, REMOVED = "demo.past_generated", "demo.past_removed"
BATCH_ROWS = 5_000


def senders() -> list[Tenant]:
    return list(Tenant.objects.filter(name__in=SHARES, active=True).order_by("name"))


def streams_to(tenant: Tenant, secret: str = "") -> list[Stream]:
    """Every stream that *tenant* sends to the active deployments, with the API key *secret*.

    A tenant that is not of the demo sends all of each class that it may use.
    """
    deployments = Deployment.objects.filter(active=True).select_related("model", "region")
    endpoints = {(row.model.name, row.region.name, row.model.context_tokens) for row in deployments}
    allowed = {*tenant.slo_classes.values_list("name", flat=True), tenant.default_slo_class.name}
    shares = SHARES.get(tenant.name, dict.fromkeys(KINDS, 1.0))
    keys = {name: secret for name in KINDS if name in allowed and name in shares}
    return [replace(stream, share=shares[stream.slo_class]) for stream in streams(endpoints, keys, settings.DEMO_DAY_S)]


def jobs_of(tenant: Tenant, sources: Iterable[Stream]) -> list[Job]:
    """The jobs that *tenant* sends beside its *sources*: to one region after the other."""
    wanted = JOBS.get(tenant.name)
    own = [stream for stream in sources if (stream.model, stream.slo_class) == wanted]
    return [Job(stream, JOB_FIRST_S + at * JOB_EVERY_S / len(own)) for at, stream in enumerate(own)]


def together(sources: Iterable[Stream]) -> list[Stream]:
    """*sources* without regard to who sends: one for each (model, region, class)."""
    merged: dict[tuple[str, str, str], Stream] = {}
    for stream in sources:
        series = (stream.model, stream.region, stream.slo_class)
        share = stream.share + (merged[series].share if series in merged else 0.0)
        merged[series] = replace(stream, share=share)
    return [merged[series] for series in sorted(merged)]


@transaction.atomic
def generate_past(now: datetime, hours: float = PAST_HOURS) -> int:
    """Give a fleet that has counted nothing yet *hours* of minutes before *now*; returns the rows.

    Once only: not beside rows that were counted, nor again after it was removed.
    """
    if MinuteRow.objects.exists() or Event.objects.filter(kind=ADDED).exists():
        return 0
    sources = together(stream for tenant in senders() for stream in streams_to(tenant))
    count = round(hours * 60)
    if not sources or count < 1:
        return 0
    began_s = time.monotonic()
    end = now.replace(second=0, microsecond=0)
    rows = MinuteRow.objects.bulk_create(
        minutes(sources, end - timedelta(minutes=count), count, seed=0), batch_size=BATCH_ROWS
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
