"""Reads of batches: those that run, the least slack first, what became of those of the last days, and keys for new ones."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.db.models import Count, QuerySet
from django.utils import timezone

from controlplane.accounts.models import ApiKey, User
from controlplane.accounts.selectors import manageable_api_keys
from controlplane.batches.models import AT_RISK, ENDED, LATE, Batch, BatchStatus
from controlplane.fleet.models import SloKind
from controlplane.fleet.selectors import names_to_ask_for

JUDGED_OVER = timedelta(days=7)


def running(rows: QuerySet[Batch] | None = None) -> list[Batch]:
    """Return those of *rows*, or of all batches, that have not ended, the least slack first."""
    rows = Batch.objects.all() if rows is None else rows
    return sorted(rows.exclude(status__in=ENDED).select_related("tenant"), key=_urgency)


def _urgency(batch: Batch) -> tuple[float, int]:
    """Slack; while it is unknown, the time until the deadline."""
    slack_s = batch.slack_s
    known = slack_s if slack_s is not None else (batch.expires_at - timezone.now()).total_seconds()
    return known, batch.pk


def keys_for_batches(user: User) -> list[ApiKey]:
    """Return the keys of *user* that a batch can have: its tenant may use such a class, and it may ask for some model."""
    able = manageable_api_keys(user).filter(account=None, tenant__active=True)
    able = able.filter(tenant__slo_classes__kind=SloKind.NON_INTERACTIVE).distinct()
    names = {tenant_id: names_to_ask_for(tenant_id) for tenant_id in {key.tenant_id for key in able}}
    return [
        key
        for key in able
        if key.usable and names[key.tenant_id].intersection(key.allowed_models or names[key.tenant_id])
    ]


def deadlines_met(rows: QuerySet[Batch]) -> tuple[int, int]:
    """Return how many of *rows* of the last `JUDGED_OVER` were completed by their deadline, and how many that is of."""
    judged = rows.filter(created_at__gte=timezone.now() - JUDGED_OVER)
    counts = dict(judged.values_list("status").annotate(Count("pk")).order_by())
    met = counts.get(BatchStatus.COMPLETED, 0)
    return met, met + counts.get(BatchStatus.EXPIRED, 0)


def figures(rows: QuerySet[Batch], open_batches: Iterable[Batch]) -> dict[str, Any]:
    """Return the numbers of *rows* in sum; *open_batches* are those that run."""
    open_batches = list(open_batches)
    met, judged = deadlines_met(rows)
    paces = [batch.lines_per_s for batch in open_batches if batch.lines_per_s is not None]
    return {
        "met": met,
        "judged": judged,
        "met_ratio": met / judged if judged else None,
        "running": len(open_batches),
        "in_danger": sum(batch.risk != "" for batch in open_batches),
        AT_RISK: sum(batch.risk == AT_RISK for batch in open_batches),
        LATE: sum(batch.risk == LATE for batch in open_batches),
        "lines_per_s": sum(paces) if paces else None,
        **left(open_batches),
    }


def left(open_batches: Iterable[Batch]) -> dict[str, Any]:
    """Return the lines of *open_batches* that are not answered yet, and the least slack of one; None while unknown."""
    slacks = [slack_s for batch in open_batches if (slack_s := batch.slack_s) is not None]
    return {"lines_left": sum(batch.lines_left for batch in open_batches), "slack_s": min(slacks, default=None)}
