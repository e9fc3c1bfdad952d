"""What the first dispatcher has to know of runs: limits of their applications, prices of tokens, and use so far."""

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Final

from channels.db import database_sync_to_async
from django.db.models import F, Q, Sum
from django.utils import timezone

from controlplane.applications.models import Application, ApplicationRun, FollowedLedger
from controlplane.dispatch.allowances.runs import UNLIMITED, Amount, RunKey, RunTerms
from controlplane.gateway.models import LedgerRow
from controlplane.usage.budgets import PRICED_OVER
from controlplane.usage.models import UsageHour

PRICED_EVERY: Final = timedelta(minutes=1)
RESUMED: Final = timedelta(days=1)
"""After a takeover, runs with a call in this are counted from their first one on."""
AT_ONCE: Final = 500
"""Runs of one query; SQLite takes a thousand values."""


class RunTermsReader:
    """Reads them; call it as `RunAllowances.load`."""

    def __init__(self) -> None:
        self._prices: dict[tuple[int, str], float] = {}
        self._priced_at: datetime | None = None

    async def __call__(self, begins: bool) -> RunTerms:
        return await database_sync_to_async(self.read)(begins)

    def read(self, begins: bool) -> RunTerms:
        now = timezone.now()
        if self._priced_at is None or now - self._priced_at >= PRICED_EVERY:
            self._prices, self._priced_at = usd_per_token(now), now
        return RunTerms(limits(), self._prices, used(now) if begins else {})


def limits() -> dict[tuple[int, str], Amount]:
    """Return the limits of applications that have any, by tenant id and name."""
    rows = Application.objects.exclude(run_max_tokens=None, run_max_usd=None)
    return {
        (tenant, name): Amount(*(UNLIMITED[at] if each is None else each for at, each in enumerate(most)))
        for tenant, name, *most in rows.values_list("tenant_id", "name", "run_max_tokens", "run_max_usd")
    }


def usd_per_token(now: datetime) -> dict[tuple[int, str], float]:
    """Return the mean charge of a token lately, by tenant id and model; of tenant 0, of all, and of model "", of all."""
    hours = UsageHour.objects.filter(hour__gte=now - PRICED_OVER, tenant__isnull=False).order_by()
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for tenant, model, usd, tokens in hours.values_list("tenant_id", "model").annotate(
        usd=Sum("charged_usd"), tokens=Sum(F("prompt_tokens") + F("output_tokens"))
    ):
        for key in ((tenant, model), (0, model), (0, "")):
            sums[key][0] += usd
            sums[key][1] += tokens
    return {key: usd / tokens for key, (usd, tokens) in sums.items() if tokens}


def used(now: datetime) -> dict[RunKey, dict[str, int]]:
    """Return the tokens by model of the runs that have had a call lately, those in the ledger."""
    mark = FollowedLedger.objects.values_list("ledger_pk", flat=True).first() or 0
    rows, names = LedgerRow.objects.order_by().exclude(application="").exclude(run=""), defaultdict(set)
    for tenant, application, run in rows.filter(pk__gt=mark).values_list("tenant_id", "application", "run").distinct():
        names[tenant, application].add(run)  # not followed yet
    since = now - RESUMED
    recent = ApplicationRun.objects.filter(Q(ended_at=None) | Q(began_at__gte=since), last_call_at__gte=since)
    for tenant, application, run in recent.values_list("application__tenant_id", "application__name", "run"):
        names[tenant, application].add(run)
    tokens: dict[RunKey, dict[str, int]] = defaultdict(dict)
    for (tenant, application), runs in names.items():
        mine = rows.filter(tenant=tenant, application=application)
        listed = sorted(runs)
        for at in range(0, len(listed), AT_ONCE):
            of_each = mine.filter(run__in=listed[at : at + AT_ONCE]).values_list("run", "model")
            for run, model, count in of_each.annotate(tokens=Sum(F("prompt_tokens") + F("output_tokens"))):
                tokens[tenant, application, run][model] = count
    return tokens
