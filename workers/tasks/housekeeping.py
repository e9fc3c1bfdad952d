"""Hourly deletion of old ledger rows, sign-in links and sessions."""

import time
from datetime import timedelta
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import SignInLink
from controlplane.gateway.models import LedgerRow
from workers.celery import app

BATCH_ROWS = 1_000
# Between two batches the gateway writes its own: on SQLite there is one writer at a time.
PAUSE_S = 0.05
MOST_BATCHES = 2_000
LINKS_KEPT = timedelta(days=1)


@app.task
def prune_ledger() -> int:
    """Delete request rows older than `PILOTHOUSE_LEDGER_KEEP_DAYS`, oldest first; minute rows stay. Return how many.

    One run deletes at most `BATCH_ROWS` x `MOST_BATCHES`; the next one continues.
    """
    oldest_kept = timezone.now() - timedelta(days=settings.LEDGER_KEEP_DAYS)
    return delete_in_batches(LedgerRow.objects.filter(arrived_at__lt=oldest_kept).order_by("arrived_at"))


def delete_in_batches(rows: QuerySet[Any]) -> int:
    """Delete *rows* in their order, at most `BATCH_ROWS` x `MOST_BATCHES` of them. Return how many."""
    deleted = 0
    for _ in range(MOST_BATCHES):
        batch = list(rows.values_list("pk", flat=True)[:BATCH_ROWS])
        if batch:
            deleted += rows.model._default_manager.filter(pk__in=batch).delete()[0]
        if len(batch) < BATCH_ROWS:
            break
        time.sleep(PAUSE_S)
    return deleted


@app.task
def prune_sign_ins() -> int:
    """Delete sign-in links a day after they expired, and expired sessions. Return how many links."""
    links, _ = SignInLink.objects.filter(expires_at__lt=timezone.now() - LINKS_KEPT).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
    return links
