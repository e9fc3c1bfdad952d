"""Deletion of old ledger rows, sign-in links and sessions."""

import time
from datetime import timedelta
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.accounts.models import SignInLink
from controlplane.gateway.models import LedgerRow

BATCH_ROWS = 1_000
RUN_S = 45.0
"""Longest time of one run: the next one, a minute after its start, continues."""
MIN_PAUSE_S = 0.01
LINKS_KEPT = timedelta(days=1)


def prune_ledger() -> int:
    """Delete request rows older than `PILOTHOUSE_LEDGER_KEEP_DAYS`, oldest first; minute rows stay. Return how many."""
    oldest_kept = timezone.now() - timedelta(days=settings.LEDGER_KEEP_DAYS)
    return delete_in_batches(LedgerRow.objects.filter(arrived_at__lt=oldest_kept).order_by("arrived_at"))


def delete_in_batches(rows: QuerySet[Any]) -> int:
    """Delete *rows* in their order, until none is left or `RUN_S` are over. Return how many.

    On SQLite there is one writer at a time: after each batch the others have as long as it took.
    """
    deleted, begun_s = 0, time.monotonic()
    while (batch_s := time.monotonic()) - begun_s < RUN_S:
        batch = rows.model._default_manager.filter(pk__in=list(rows.values_list("pk", flat=True)[:BATCH_ROWS]))
        gone = batch.delete()[0]
        deleted += gone
        if gone < BATCH_ROWS:
            break
        time.sleep(max(MIN_PAUSE_S, time.monotonic() - batch_s))
    return deleted


def prune_sign_ins() -> int:
    """Delete sign-in links a day after they expired, and expired sessions. Return how many links."""
    links, _ = SignInLink.objects.filter(expires_at__lt=timezone.now() - LINKS_KEPT).delete()
    import_module(settings.SESSION_ENGINE).SessionStore.clear_expired()
    return links
