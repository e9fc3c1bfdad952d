"""Reads of the request ledger and of its minute series."""

from collections import defaultdict
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

from django.db.models import Case, CharField, Count, F, OuterRef, Q, QuerySet, Subquery, Sum, Value, When
from django.db.models.functions import Abs

from controlplane.dispatch.port import ESTIMATE, KV_EVENTS
from controlplane.fleet.attainment import Attainment
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome
from controlplane.rows import narrowed

OWN_REGION = Case(When(own_region="", then=F("region")), default=F("own_region"))
"""Region of the caller of a ledger row, or of the callers of a minute row."""

MISSED_BY: Final = {
    "failed": "failed or refused",
    "moved": "placed again after a loss",
    "queue": "waited in the queue",
    "prefill": "slow prefill",
    "decode": "slow decode",
}
"""What made a request miss its SLO, in words."""


def by_cause(rows: QuerySet[LedgerRow], cause: str = "") -> QuerySet[LedgerRow]:
    """Those of *rows* that missed their SLO, with `cause`, one of `MISSED_BY`; only those with *cause* if it is given."""
    target = Subquery(SloClass.objects.filter(name=OuterRef("slo_class")).values("ttft_target_ms")[:1])
    first_ms = Case(When(ttft_ms=None, then=F("e2e_ms")), default=F("ttft_ms"))
    late = Q(first_ms__gt=F("target")) | Q(ttft_ms=None)
    ways = (
        When(outcome__in=[Outcome.FAILED, Outcome.REJECTED], then=Value("failed")),
        When(attempts__gt=1, then=Value("moved")),
        When(late, queue_ms__gte=F("first_ms") / 2, then=Value("queue")),
        When(late, then=Value("prefill")),
    )
    missed: Any = rows.filter(slo_met=False).annotate(target=target, first_ms=first_ms)
    missed = missed.annotate(cause=Case(*ways, default=Value("decode"), output_field=CharField()))
    return cast("QuerySet[LedgerRow]", missed.filter(cause=cause) if cause else missed)


def missed_by(rows: QuerySet[LedgerRow]) -> list[tuple[str, float]]:
    """Return the share of each cause among those of *rows* that missed their SLO, the greatest first."""
    missed: Any = by_cause(rows).order_by()
    counted = missed.values_list("cause").annotate(count=Count("pk"))
    counts = sorted(counted, key=lambda each: -each[1])
    return [(cause, count / sum(count for _, count in counts)) for cause, count in counts]


def tokens_since(since: datetime, tenant_id: int | None, key_id: int | None, model: str) -> int:
    """Return the tokens of requests that arrived since then, of a tenant, key and model (None, "": of all)."""
    names = {"tenant_id": tenant_id, "api_key_id": key_id, "model": model}
    rows = narrowed(LedgerRow.objects.all(), arrived_at__gte=since, **names)
    return rows.aggregate(sum=Sum(F("prompt_tokens") + F("output_tokens")))["sum"] or 0


def attainments(since: datetime, **names: str) -> dict[tuple[str, str], dict[str, Attainment]]:
    """Return attainment of SLO classes in the minutes from *since* on, by (model, region that served) and class.

    *names* narrows model, region, class. A failure in a class that promises nothing is no miss; nor is one in a deleted
    class, whose promises are unknown.
    """
    objectives = {row.name: row.percentile / 100 for row in SloClass.objects.all() if row.promises}
    counted = MinuteRow.objects.filter(minute__gte=since, slo_class__in=objectives).order_by()
    sums = narrowed(counted, **names).values_list("model", "region", "slo_class")
    served: dict[tuple[str, str], dict[str, Attainment]] = defaultdict(dict)
    for model, region, name, met, judged in sums.annotate(Sum("slo_met"), Sum("slo_judged")):
        served[model, region][name] = Attainment(name, met, judged, objectives[name])
    return served


class PrefixHits(NamedTuple):
    """Prompt tokens of answered requests whose instances report what was cached."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    expected_tokens: int
    """As the router expected, of the requests that it did for."""
    of_tokens: int
    """Prompt tokens of those."""
    event_tokens: int = 0
    """Of those, prompt tokens of the requests for which it went by KV events."""
    event_wrong_tokens: int = 0
    """By how much these expectations were wrong, in all."""
    estimate_tokens: int = 0
    estimate_wrong_tokens: int = 0
    """The same of the requests for which it estimated."""

    @property
    def ratio(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def expected_ratio(self) -> float | None:
        return self.expected_tokens / self.of_tokens if self.of_tokens else None

    @property
    def wrong_by_events(self) -> float | None:
        """By how much expectations from KV events were wrong, as a share of the prompts."""
        return self.event_wrong_tokens / self.event_tokens if self.event_tokens else None

    @property
    def wrong_by_estimate(self) -> float | None:
        return self.estimate_wrong_tokens / self.estimate_tokens if self.estimate_tokens else None


def prefix_hits(since: datetime, **names: str) -> PrefixHits:
    """Return the hits of prefix caches from *since* on; *names* narrows model, instance."""
    rows = narrowed(LedgerRow.objects.filter(arrived_at__gte=since, cached_tokens__isnull=False), **names)
    known = Q(expected_cached_tokens__isnull=False)
    wrong = Abs(F("expected_cached_tokens") - F("cached_tokens"))
    sums = rows.order_by().aggregate(
        sum_requests=Count("pk"),
        sum_prompt=Sum("prompt_tokens", default=0),
        sum_cached=Sum("cached_tokens", default=0),
        sum_expected=Sum("expected_cached_tokens", default=0),
        sum_of=Sum("prompt_tokens", filter=known, default=0),
        **{
            f"{by}_{name}": Sum(summed, filter=Q(expected_by=by), default=0)
            for by in (KV_EVENTS, ESTIMATE)
            for name, summed in (("of", F("prompt_tokens")), ("wrong", wrong))
        },
    )
    return PrefixHits(*sums.values())
