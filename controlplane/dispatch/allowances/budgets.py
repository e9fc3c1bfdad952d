"""Budgets on the data path: requests and tokens a minute, dollars a month.

They are exact in the memory of the first dispatcher, which counts all requests. Minutes slide: a limit holds over any 60
seconds, in buckets of one second. Tokens and dollars are counted as predicted when a request is admitted, and corrected when
it ends. The month's dollars are those that usage has counted for the budget's row, plus what ended since at the row's price
of a token; so they survive a restart. A restart forgets the last minute.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo

from channels.db import database_sync_to_async
from django.db.models import Q
from django.utils import timezone

from controlplane.accounts.models import Budget, BudgetKind
from controlplane.dispatch.allowances.limits import Exceeded
from controlplane.events.models import Severity
from controlplane.events.services import record

WINDOW_S = 60
COUNTED_LATE_S = 5.0
"""Time after its end within which a request may be missing in what usage has counted."""
ALERT_EVERY = timedelta(hours=1)
"""Shortest interval between two alerts of a budget by the minute."""
RATES = frozenset({BudgetKind.REQUESTS, BudgetKind.TOKENS})
TokensSince = Callable[[datetime, int | None, int | None, str], int]
"""Tokens of the ledger's requests that arrived since a moment, of a tenant, key and model (None, "": of all)."""


@dataclass(frozen=True, slots=True)
class BudgetTerms:
    """A budget as the data path needs it."""

    pk: int
    kind: BudgetKind
    scope: str
    amount: str
    tenant_id: int | None = None
    key_id: int | None = None
    model: str = ""
    soft: float | None = None
    hard: float | None = None
    spent_usd: float = 0.0
    spent_until_s: float = 0.0
    """Epoch seconds."""
    usd_per_token: float = 0.0
    zone: tzinfo = UTC
    """Of its months."""

    @classmethod
    def of(cls, row: Budget) -> "BudgetTerms":
        return cls(
            pk=row.pk,
            kind=BudgetKind(row.kind),
            scope=row.scope,
            amount=row.amount,
            tenant_id=row.tenant_id,
            key_id=row.api_key_id,
            model=row.model,
            soft=row.soft,
            hard=row.hard,
            spent_usd=row.spent_usd,
            spent_until_s=row.spent_until.timestamp() if row.spent_until else 0.0,
            usd_per_token=row.usd_per_token,
            zone=row.zone,
        )

    def covers(self, tenant_id: int, key_id: int, model: str) -> bool:
        """Whether a request of this key for *model* counts."""
        return self.tenant_id in (None, tenant_id) and self.key_id in (None, key_id) and self.model in ("", model)

    def costs(self, tokens: int) -> float:
        """Return what a request of *tokens* uses of the budget, in its unit."""
        match self.kind:
            case BudgetKind.REQUESTS:
                return 1.0
            case BudgetKind.TOKENS:
                return float(tokens)
        return tokens * self.usd_per_token


class BudgetUse:
    """What was used of one budget: by the second in the last minute, or dollars since usage was counted last."""

    def __init__(self, terms: BudgetTerms) -> None:
        self.terms = terms
        self.reserved_usd = 0.0
        self._seconds: dict[int, float] = {}
        self._ended: dict[int, float] = {}  # dollars by epoch second of the end that usage may not have counted
        self._ended_usd = self._month_s = 0.0  # the sum of these, and when their month began

    def used(self, now_s: float, wall_s: float) -> float:
        """Return what counts now, in the budget's unit; a month begins at nothing."""
        if self.terms.kind is BudgetKind.USD:
            begin_s = month_of(wall_s, self.terms.zone).timestamp()
            if begin_s != self._month_s:
                self._month_s = begin_s
                self._forget(begin_s)
            spent_usd = self.terms.spent_usd if self.terms.spent_until_s >= begin_s else 0.0
            return spent_usd + self.reserved_usd + self._ended_usd
        oldest = math.floor(now_s) - WINDOW_S
        for second in [each for each in self._seconds if each < oldest]:
            del self._seconds[second]
        return sum(self._seconds.values())

    def free_in_s(self, amount: float, now_s: float) -> float:
        """Return seconds until *amount* fits below the hard limit of a minute."""
        left = sum(self._seconds.values())
        for second in sorted(self._seconds):
            left -= self._seconds[second]
            if left + amount <= (self.terms.hard or 0.0) or left <= 0.0:
                return max(0.001, second + WINDOW_S + 1 - now_s)
        return 1.0

    def add(self, second: int, amount: float) -> None:
        self._seconds[second] = self._seconds.get(second, 0.0) + amount

    def correct(self, second: int, amount: float) -> None:
        """Add *amount*, which may be negative, to a second that still counts."""
        if second in self._seconds:
            self._seconds[second] += amount

    def end(self, wall_s: float, usd: float) -> None:
        if usd:
            second = math.floor(wall_s)
            self._ended[second] = self._ended.get(second, 0.0) + usd
            self._ended_usd += usd

    def _forget(self, before_s: float) -> None:
        self._ended = {second: usd for second, usd in self._ended.items() if second >= math.floor(before_s)}
        self._ended_usd = sum(self._ended.values())

    def update(self, terms: BudgetTerms) -> None:
        """Take the row as it is now; what usage has counted since is no longer added to it."""
        if terms.spent_until_s > self.terms.spent_until_s:
            self._forget(terms.spent_until_s - COUNTED_LATE_S)
        self.terms = terms


@dataclass(slots=True)
class BudgetHold:
    """What an admitted request holds of its budgets, until it is settled."""

    budgets: "Budgets"
    second: int
    held: list[tuple[BudgetUse, float]]
    warnings: list[str] = field(default_factory=list)
    """Budgets that are above their soft limit, for a header."""
    reserved: bool = True
    settled: bool = False

    def reserve(self, on: bool) -> None:
        """Reserve its dollars, or no longer. Its minute counts it as predicted either way."""
        if on is not self.reserved:
            self.reserved = on
            for use, amount in self.held:
                if use.terms.kind is BudgetKind.USD:
                    use.reserved_usd = max(0.0, use.reserved_usd + (amount if on else -amount))

    def settle(self, tokens: int) -> None:
        """Correct the prediction to the *tokens* that were used. Only the first call counts."""
        if self.settled:
            return
        self.reserve(False)
        self.settled = True
        wall_s = self.budgets.wall_clock()
        for use, amount in self.held:
            cost = use.terms.costs(tokens)
            if use.terms.kind is BudgetKind.USD:
                use.end(wall_s, cost)
            elif use.terms.kind is BudgetKind.TOKENS:
                use.correct(self.second, cost - amount)

    def cancel(self) -> None:
        """Take the request out of every count: it was not admitted after all."""
        if self.settled:
            return
        self.reserve(False)
        self.settled = True
        for use, amount in self.held:
            if use.terms.kind is not BudgetKind.USD:
                use.correct(self.second, -amount)


class Budgets:
    """All budgets of requests. *clock* is monotonic; batch lines waiting are counted where batches are made."""

    def __init__(
        self, clock: Callable[[], float], tokens_since: TokensSince, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.clock, self.tokens_since, self.wall_clock = clock, tokens_since, wall_clock
        self.uses: dict[int, BudgetUse] = {}
        self._reached: dict[int, str] = {}  # by budget: "soft" or "hard", since the last refresh

    def of(self, tenant_id: int, key_id: int, model: str) -> Iterator[BudgetUse]:
        return (use for use in self.uses.values() if use.terms.covers(tenant_id, key_id, model))

    def enter(self, tenant_id: int, key_id: int, model: str, tokens: int, *, rates: bool = True) -> BudgetHold:
        """Admit a request of *tokens*, prompt and predicted output. Raises Exceeded; then nothing is counted.

        A request larger than a whole minute's limit is admitted when nothing else was in that minute. *rates*: whether
        budgets by the minute apply.
        """
        now_s, wall_s = self.clock(), self.wall_clock()
        held, warnings = [], []
        for use in self.of(tenant_id, key_id, model):
            terms = use.terms
            if terms.kind in RATES and not rates:
                continue
            used, amount = use.used(now_s, wall_s), terms.costs(tokens)
            if terms.hard is not None and _exceeds(terms, used, amount):
                if terms.kind in RATES or self.is_spent(use):
                    self._reached[terms.pk] = "hard"
                raise _refused(use, used, amount, tokens, now_s, wall_s)
            if terms.soft is not None and used + amount > terms.soft:
                self._reached.setdefault(terms.pk, "soft")
                warnings.append(f"{terms.scope}: {used + amount:,.2f} of {terms.amount}")
            held.append((use, amount))
        return self._hold(held, warnings)

    def hold(self, tenant_id: int, key_id: int, model: str, tokens: int, *, rates: bool) -> BudgetHold:
        """Count a request that was admitted already, whatever is left of its budgets."""
        uses = [use for use in self.of(tenant_id, key_id, model) if rates or use.terms.kind not in RATES]
        return self._hold([(use, use.terms.costs(tokens)) for use in uses], [])

    def _hold(self, held: list[tuple[BudgetUse, float]], warnings: list[str]) -> BudgetHold:
        second = math.floor(self.clock())
        for use, amount in held:
            if use.terms.kind is BudgetKind.USD:
                use.reserved_usd += amount
            else:
                use.add(second, amount)
        return BudgetHold(self, second, held, warnings)

    def spent(self) -> list[BudgetTerms]:
        """Return the budgets of dollars that stop requests, whatever is still reserved."""
        spent = [use.terms for use in self.uses.values() if self.is_spent(use)]
        self._reached.update((terms.pk, "hard") for terms in spent)
        return spent

    def is_spent(self, use: BudgetUse) -> bool:
        if use.terms.kind is not BudgetKind.USD or use.terms.hard is None:
            return False
        return use.used(self.clock(), self.wall_clock()) - use.reserved_usd >= use.terms.hard

    def forget(self) -> None:
        """Begin with nothing: another process has counted since. `read` reads everything."""
        self.uses, self._reached = {}, {}

    async def read(self) -> None:
        """Read the rows again. Raises what the database raises."""
        rows, ended = await database_sync_to_async(self._load)(set(self.uses))
        self.apply(rows)
        for pk, usd in ended.items():
            self.uses[pk].end(self.wall_clock(), usd)

    async def note(self) -> None:
        """Write what was reached since the last call. Raises what the database raises; the next call writes it then."""
        reached, self._reached = self._reached, {}
        stopping = {pk for pk, use in self.uses.items() if self.is_spent(use)}
        try:
            await database_sync_to_async(_note)(reached, stopping)
        except BaseException:
            self._reached = reached | self._reached
            raise

    def apply(self, rows: list[BudgetTerms]) -> None:
        """Replace the budgets by *rows*; what was used of those that stay still counts."""
        uses = {}
        for terms in rows:
            use = self.uses.get(terms.pk)
            if use is None or use.terms.kind is not terms.kind:
                use = BudgetUse(terms)
            use.update(terms)
            uses[terms.pk] = use
        self.uses = uses

    def _load(self, known: Collection[int]) -> tuple[list[BudgetTerms], dict[int, float]]:
        """Return the budgets of requests, and of those not in *known* the costs in the ledger that usage has not counted."""
        rows = Budget.objects.exclude(kind=BudgetKind.BATCH_LINES).select_related("tenant", "api_key")
        terms = [BudgetTerms.of(row) for row in rows]
        new = [each for each in terms if each.kind is BudgetKind.USD and each.pk not in known]
        return terms, {each.pk: self._not_counted_usd(each) for each in new}

    def _not_counted_usd(self, terms: BudgetTerms) -> float:
        """Return what requests cost that arrived after usage was counted last; this month's at most."""
        since_s = max(terms.spent_until_s - COUNTED_LATE_S, month_of(self.wall_clock(), terms.zone).timestamp())
        since = datetime.fromtimestamp(since_s, UTC)
        return self.tokens_since(since, terms.tenant_id, terms.key_id, terms.model) * terms.usd_per_token


def _exceeds(terms: BudgetTerms, used: float, amount: float) -> bool:
    """Whether a request of *amount* does not fit; what is larger than a whole minute's limit fits alone."""
    hard = terms.hard or 0.0
    if terms.kind is BudgetKind.USD:
        return used >= hard
    return used + amount > hard and (used > 0.0 or hard == 0.0)


def _refused(use: BudgetUse, used: float, amount: float, tokens: int, now_s: float, wall_s: float) -> Exceeded:
    terms = use.terms
    header = ((b"x-budget", f"{terms.scope}: {terms.amount}".encode("ascii", "replace")),)
    if terms.kind is BudgetKind.USD:
        if used - use.reserved_usd < (terms.hard or 0.0):
            return Exceeded(
                f"The budget of {terms.scope}, {terms.amount}, is held by open requests: ${use.reserved_usd:,.2f} of"
                f" ${used:,.2f}. Try again when one has ended.",
                code="budget_held",
                retry_after_s=1.0,
                headers=header,
            )
        again_at = next_month_of(wall_s, terms.zone)
        left_s = again_at.timestamp() - wall_s
        return Exceeded(
            f"The budget of {terms.scope}, {terms.amount}, is spent (${used:,.2f}). It begins again on"
            f" {again_at:%Y-%m-%d %H:%M} ({terms.zone}), in {left_s / 86_400:.1f} days, or when it is raised.",
            type="insufficient_quota",
            code="budget_spent",
            headers=(*header, (b"retry-after", b"%d" % math.ceil(left_s))),
        )
    wait_s = use.free_in_s(amount, now_s)
    return Exceeded(
        f"The budget of {terms.scope}, {terms.amount}, is reached: {used:,.0f} in the last minute"
        + (f", and this request needs about {tokens}" if terms.kind is BudgetKind.TOKENS else "")
        + f". Try again in {wait_s:.1f} s.",
        code="rate_limit_exceeded",
        retry_after_s=wait_s,
        headers=header,
    )


def month_of(wall_s: float, zone: tzinfo) -> datetime:
    """Return the first moment of the month, in *zone*, of an epoch second."""
    return datetime.fromtimestamp(wall_s, zone).replace(day=1, hour=0, minute=0, second=0, microsecond=0, fold=0)


def next_month_of(wall_s: float, zone: tzinfo) -> datetime:
    return month_of((month_of(wall_s, zone) + timedelta(days=32)).timestamp(), zone)


def _note(reached: dict[int, str], stopping: set[int]) -> None:
    """Write events of budgets that were *reached*, once in a while, and which of them are stopping requests."""
    now = timezone.now()
    for row in Budget.objects.filter(Q(pk__in=reached) | Q(stopped_at__isnull=False)).select_related(
        "tenant", "api_key"
    ):
        begin = month_of(now.timestamp(), row.zone) if row.kind == BudgetKind.USD else now - ALERT_EVERY
        how = reached.get(row.pk)
        if how == "hard" and (row.stopped_at is None or row.stopped_at < begin):
            row.stopped_at = now
            row.save(update_fields=["stopped_at"])
            record("budget.reached", row, actor="gateway", after={"limit": row.amount}, severity=Severity.WARNING)
        elif how == "soft" and (row.alerted_at is None or row.alerted_at < begin):
            row.alerted_at = now
            row.save(update_fields=["alerted_at"])
            record("budget.nearly_reached", row, actor="gateway", after={"soft": row.soft}, severity=Severity.WARNING)
        elif row.stopped_at is not None and row.kind == BudgetKind.USD and row.pk not in stopping and how is None:
            row.stopped_at = None
            row.save(update_fields=["stopped_at"])
            record("budget.free_again", row, actor="gateway", after={"limit": row.amount})
