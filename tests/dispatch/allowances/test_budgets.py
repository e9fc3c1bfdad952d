"""Budgets of requests: exact whatever happens to a request, and across restarts."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import hypothesis.strategies as st
import pytest
from asgiref.sync import sync_to_async
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.accounts.models import ApiKey, Budget, BudgetKind, Tenant
from controlplane.dispatch.allowances.allowances import Allowances
from controlplane.dispatch.allowances.budgets import Budgets, BudgetTerms, next_month_of
from controlplane.dispatch.allowances.limits import Exceeded
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.selectors import tokens_since
from controlplane.usage.budgets import count_budgets
from controlplane.usage.models import UsageHour, UsageMark

AT_S = datetime(2026, 5, 10, tzinfo=UTC).timestamp()
USD, TOKENS, REQUESTS = BudgetKind.USD, BudgetKind.TOKENS, BudgetKind.REQUESTS


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s

    def wall(self):
        return AT_S + self.now_s


def budgets_of(*terms):
    clock = Clock()
    budgets = Budgets(clock, tokens_since, clock.wall)
    budgets.apply(list(terms))
    return budgets, clock


def terms(pk=1, kind=TOKENS, **more):
    return BudgetTerms(pk, kind, "acme", "its limit", **{"tenant_id": 1, "hard": 100.0} | more)


class Requests(RuleBasedStateMachine):
    """Requests come, end, fail and are cancelled in any order; a plain list says what must count."""

    @initialize(
        requests=st.integers(1, 6),
        tokens=st.integers(20, 200),
        usd=st.floats(0.5, 3.0),
    )
    def start(self, requests, tokens, usd):
        self.limits = {REQUESTS: requests, TOKENS: tokens, USD: usd}
        self.budgets, self.clock = budgets_of(
            terms(1, REQUESTS, hard=requests),
            terms(2, TOKENS, hard=tokens),
            terms(3, USD, hard=usd, usd_per_token=0.01),
            terms(4, TOKENS, hard=1.0, tenant_id=2),  # another tenant's
        )
        self.open, self.log = [], []  # log: [second, requests, tokens] of what was admitted
        self.usd = 0.0

    def counted(self):
        first = int(self.clock.now_s) - 60
        recent = [each for each in self.log if each[0] >= first]
        return sum(each[1] for each in recent), sum(each[2] for each in recent)

    @rule(tokens=st.integers(1, 80))
    def enter(self, tokens):
        requests, used = self.counted()
        usd = self.usd + sum(0.01 * each[1] for each in self.open)
        fits = requests + 1 <= self.limits[REQUESTS]
        fits = fits and (used + tokens <= self.limits[TOKENS] or used <= 0) and usd < self.limits[USD]
        if not fits:
            with pytest.raises(Exceeded):
                self.budgets.enter(1, 7, "m", tokens)
            return
        entry = [int(self.clock.now_s), 1, tokens]
        self.open.append((self.budgets.enter(1, 7, "m", tokens), tokens, entry))
        self.log.append(entry)

    @rule(at=st.integers(0, 30), tokens=st.integers(0, 120), twice=st.booleans())
    def end(self, at, tokens, twice):
        """It finishes, fails (with fewer tokens) or its caller leaves (perhaps with none)."""
        if self.open:
            admission, _, entry = self.open.pop(at % len(self.open))
            admission.settle(tokens)
            if twice:
                admission.settle(99)
                admission.cancel()
            entry[2] = tokens
            self.usd += 0.01 * tokens

    @rule(at=st.integers(0, 30))
    def refused_by_another_limit(self, at):
        if self.open:
            admission, _, entry = self.open.pop(at % len(self.open))
            admission.cancel()
            entry[1] = entry[2] = 0

    @rule(seconds=st.sampled_from([0.3, 5.0, 59.0, 61.0]))
    def time_passes(self, seconds):
        self.clock.now_s += seconds

    @rule()
    def rows_are_read_again(self):
        self.budgets.apply([use.terms for use in self.budgets.uses.values()])

    @invariant()
    def exactly_what_was_used_counts(self):
        now_s, wall_s = self.clock.now_s, self.clock.wall()
        uses = self.budgets.uses
        requests, tokens = self.counted()
        assert uses[1].used(now_s, wall_s) == pytest.approx(requests)
        assert uses[2].used(now_s, wall_s) == pytest.approx(tokens)
        reserved = sum(0.01 * each[1] for each in self.open)
        assert uses[3].reserved_usd == pytest.approx(reserved)
        assert uses[3].used(now_s, wall_s) == pytest.approx(self.usd + reserved)
        assert uses[4].used(now_s, wall_s) == 0.0


TestRequests = Requests.TestCase
TestRequests.settings = hypothesis_settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("scope", "counts"),
    [
        ({"tenant_id": 1}, True),
        ({"tenant_id": 2}, False),
        ({"tenant_id": 1, "key_id": 7}, True),
        ({"tenant_id": 1, "key_id": 8}, False),
        ({"tenant_id": None, "model": "m"}, True),
        ({"tenant_id": 1, "model": "n"}, False),
    ],
)
def test_a_request_counts_towards_the_budgets_of_its_tenant_key_and_model(scope, counts):
    budgets, _ = budgets_of(terms(**scope))
    budgets.enter(1, 7, "m", 40)
    assert budgets.uses[1].used(1000.0, AT_S) == (40.0 if counts else 0.0)


def test_a_refusal_says_when_it_fits_again():
    budgets, clock = budgets_of(terms(hard=100.0))
    budgets.enter(1, 7, "m", 60)
    clock.now_s += 10
    budgets.enter(1, 7, "m", 40)
    with pytest.raises(Exceeded) as refused:
        budgets.enter(1, 7, "m", 50)
    error = refused.value
    assert (error.code, error.retry_after_s) == ("rate_limit_exceeded", 51.0)
    assert (b"x-budget", b"acme: its limit") in error.headers
    clock.now_s += error.retry_after_s
    budgets.enter(1, 7, "m", 50)


def test_a_request_larger_than_a_minute_is_admitted_alone():
    budgets, _ = budgets_of(terms(hard=100.0))
    budgets.enter(1, 7, "m", 500)
    with pytest.raises(Exceeded):
        budgets.enter(1, 7, "m", 1)


def test_dollars_stop_until_the_next_month_and_say_so():
    budgets, clock = budgets_of(terms(kind=USD, hard=4.0, spent_usd=4.0, spent_until_s=AT_S))
    with pytest.raises(Exceeded) as refused:
        budgets.enter(1, 7, "m", 1)
    headers = dict(refused.value.headers)
    assert (refused.value.code, refused.value.retry_after_s) == ("budget_spent", None)
    assert int(headers[b"retry-after"]) == pytest.approx(next_month_of(AT_S, UTC).timestamp() - clock.wall(), abs=1)
    assert [one.pk for one in budgets.spent()] == [1]
    clock.now_s += int(headers[b"retry-after"])
    budgets.enter(1, 7, "m", 1)
    assert not budgets.spent()


def test_dollars_that_open_requests_hold_are_no_dollars_spent():
    budgets, _ = budgets_of(terms(kind=USD, hard=1.0, usd_per_token=0.01))
    held = [budgets.enter(1, 7, "m", 50) for _ in range(2)]
    with pytest.raises(Exceeded, match=r"held by open requests: \$1.00 of \$1.00") as refused:
        budgets.enter(1, 7, "m", 50)
    assert (refused.value.code, refused.value.retry_after_s) == ("budget_held", 1.0)
    assert not budgets.spent()
    assert not budgets._reached
    held[0].settle(1)
    budgets.enter(1, 7, "m", 50)


def test_what_ended_is_kept_by_the_second():
    """While usage does not count, for months."""
    budgets, clock = budgets_of(terms(kind=USD, usd_per_token=0.01))
    for _ in range(1000):
        budgets.enter(1, 7, "m", 1).settle(1)
    use = budgets.uses[1]
    assert use.used(clock.now_s, clock.wall()) == pytest.approx(10.0)
    assert len(use._ended) == 1
    assert use.used(clock.now_s, next_month_of(clock.wall(), UTC).timestamp()) == 0.0
    assert not use._ended


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "Asia/Kathmandu", "UTC"])
def test_a_month_ends_at_midnight_of_the_tenants_zone(zone):
    """D27: what was spent until 23:00 on 30 September there counts; at midnight nothing does, and a refusal names both."""
    zone = ZoneInfo(zone)
    october = datetime(2026, 10, 1, tzinfo=zone).timestamp()
    row = terms(kind=USD, hard=1.0, spent_usd=1.5, spent_until_s=october - 3600, zone=zone)
    for at_s, spent in ((october - 1, True), (october + 1, False)):
        budgets = Budgets(lambda: 1000.0, tokens_since, lambda at_s=at_s: at_s)
        budgets.apply([row])
        assert bool(budgets.spent()) == spent
        if not spent:
            budgets.enter(1, 7, "m", 40)
            continue
        with pytest.raises(Exceeded, match=rf"begins again on 2026-10-01 00:00 \({zone}\)") as refused:
            budgets.enter(1, 7, "m", 40)
        assert dict(refused.value.headers)[b"retry-after"] == b"1"


@pytest.mark.django_db
def test_a_budget_counts_the_month_of_its_tenants_zone():
    from tests.gateway.rows import make_rows

    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)
    Tenant.objects.update(time_zone="Asia/Kolkata")
    tenant = Tenant.objects.get()
    begin = datetime(2026, 10, 1, tzinfo=ZoneInfo("Asia/Kolkata"))
    for quarter, usd in ((-1, 50.0), (0, 2.0), (1, 1.0)):
        at = begin + quarter * timedelta(minutes=15)
        UsageHour.objects.create(hour=at, tenant=tenant, model="m", charged_usd=usd, prompt_tokens=1)
    UsageMark.objects.create(counted_until=begin + timedelta(hours=1))
    budget = Budget.objects.create(tenant=tenant, kind=USD, hard=5)
    count_budgets(begin + timedelta(hours=1))
    budget.refresh_from_db()
    assert budget.spent_usd == 3.0
    assert budget.amount == "$5.00 a month (Asia/Kolkata)"


def test_what_usage_has_counted_is_not_counted_twice():
    row = terms(kind=USD, hard=9.0, usd_per_token=0.01, spent_until_s=AT_S)
    budgets, clock = budgets_of(row)
    budgets.enter(1, 7, "m", 50).settle(100)
    assert budgets.uses[1].used(clock.now_s, clock.wall()) == pytest.approx(1.0)
    clock.now_s += 60
    counted = terms(kind=USD, hard=9.0, usd_per_token=0.01, spent_usd=0.8, spent_until_s=clock.wall())
    budgets.apply([counted])
    assert budgets.uses[1].used(clock.now_s, clock.wall()) == pytest.approx(0.8)


@pytest.mark.django_db
def test_a_months_dollars_survive_a_restart(django_user_model, db):
    from tests.gateway.rows import make_rows

    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)
    tenant, key = Tenant.objects.get(), ApiKey.objects.get()
    now = datetime.now(UTC)
    hour = now.replace(minute=0, second=0, microsecond=0)
    common = {"tenant": tenant, "api_key": key, "model": "m", "slo_class": "interactive"}
    UsageHour.objects.create(hour=hour, **common, prompt_tokens=600, output_tokens=400, charged_usd=2.0)
    UsageHour.objects.create(hour=hour - timedelta(days=40), **common, prompt_tokens=1, charged_usd=50.0)
    UsageHour.objects.create(hour=hour, model="m", cost_usd=70.0)  # idle
    UsageMark.objects.create(counted_until=now)
    Budget.objects.create(tenant=tenant, model="m", kind=USD, hard=5)
    Budget.objects.create(tenant=tenant, api_key=key, model="other", kind=USD, hard=5)
    count_budgets(now)
    LedgerRow.objects.create(
        request_id="r", arrived_at=now + timedelta(seconds=1), tenant=tenant, api_key=key, model="m",
        slo_class="interactive", streamed=False, outcome="done", status_code=200, prompt_tokens=300, output_tokens=200,
    )  # fmt: skip
    budgets = Budgets(Clock(), tokens_since)
    rows, ended = budgets._load({})
    budgets.apply(rows)
    for pk, usd in ended.items():
        budgets.uses[pk].end(now.timestamp(), usd)
    used = {use.terms.model: use.used(0.0, now.timestamp()) for use in budgets.uses.values()}
    assert used == {"m": pytest.approx(3.0), "other": 0.0}


async def test_who_takes_over_counts_what_another_process_served(transactional_db):
    """And while it stands by it writes nothing of what it does not count."""
    from tests.gateway.rows import make_rows

    now = datetime.now(UTC)
    await sync_to_async(make_rows)([], regions=[], max_num_seqs=1, queue_bound=1)
    tenant, owner = await Tenant.objects.aget(), [0]
    budget = await Budget.objects.acreate(
        tenant=tenant, kind=USD, hard=9, usd_per_token=0.01, spent_until=now - timedelta(seconds=30), stopped_at=now
    )
    standby = Allowances(Budgets(Clock(), tokens_since), lambda record: None, lambda: owner[0])
    await standby.refresh()
    await LedgerRow.objects.acreate(
        request_id="r", arrived_at=now, tenant=tenant, model="m", slo_class="interactive", streamed=False,
        outcome="done", status_code=200, prompt_tokens=300, output_tokens=200,
    )  # fmt: skip
    await standby.refresh()
    await budget.arefresh_from_db()
    assert budget.stopped_at == now
    owner[0] = 2
    for _ in range(2):
        await standby.refresh()
        (use,) = standby.budgets.uses.values()
        assert use.used(0.0, now.timestamp()) == pytest.approx(5.0)
    await budget.arefresh_from_db()
    assert budget.stopped_at is None  # 4 dollars are left
