"""Limits and budgets over relays that die and dispatchers that take over: exactly what one process would count.

Each relay is the gateway's real side (`Entries`), joined by queues in which records wait as long as they like. Plain sums
say what must be counted and who must be refused.
"""

import asyncio
from collections import deque
from itertools import count, islice
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from controlplane.accounts.models import BudgetKind
from controlplane.dispatch import port
from controlplane.dispatch.allowances.allowances import Allowances
from controlplane.dispatch.allowances.budgets import Budgets, BudgetTerms
from controlplane.gateway.admission import entries as entries_module
from controlplane.gateway.admission.entries import Entries
from controlplane.gateway.errors import ApiError
from tests.examples import costly

SEQUENCES, PER_MINUTE, REGISTERING_S, USD_PER_TOKEN = 6, 300, 2.0, 0.01


def request(number, tokens=10, sequences=1, max_wait_s=None, **grant):
    """A request as `Entries` sees it."""
    terms = {"max_concurrent_requests": SEQUENCES, "tokens_per_minute": PER_MINUTE, "rates": True} | grant
    return SimpleNamespace(
        asked=SimpleNamespace(
            number=number,
            tenant_id=1,
            api_key_id=7,
            model="m",
            sequences=sequences,
            max_wait_s=max_wait_s,
            application="",
            run="",
        ),
        grant=SimpleNamespace(**terms),
        expected_tokens=tokens,
        most_tokens=tokens,
        run_limits=(None, None),
        prompt_tokens=0,
        output_tokens=0,
        fell_back=False,
        budget_warnings=(),
        entering=None,
    )


def terms(pk, kind, hard, **more):
    return BudgetTerms(pk, kind, "acme", "its limit", tenant_id=1, hard=hard, usd_per_token=USD_PER_TOKEN, **more)


class Rows(Budgets):
    """Budgets of *rows*, and of what the ledger has for that of dollars when a process begins to count."""

    def __init__(self, clock, rows, ledger_usd=0.0):
        super().__init__(clock, lambda *_: 0, lambda: 1_780_000_000.0 + clock())
        self.rows, self.ledger_usd = rows, ledger_usd

    async def read(self):
        began = not self.uses
        self.apply(self.rows)
        if began and 3 in self.uses:
            self.uses[3].end(self.wall_clock(), self.ledger_usd)

    async def note(self):
        pass


class Relay:
    """Sends into `out` and reads from `into`; of what it sends before it has registered, only the ends are kept."""

    def __init__(self, number):
        self.number, self.registered, self.open = number, True, []
        self.out, self.into, self.numbers = deque(), deque(), count(number << port.RELAY_BITS)
        self.entries = Entries(self.send, None)

    def send(self, record):
        if self.registered or isinstance(record, port.Leave):
            self.out.append(record)

    def lose(self):
        self.registered = False
        self.out = deque(record for record in self.out if isinstance(record, port.Leave))
        self.into.clear()

    def register(self):
        self.registered = True
        self.out.extend(self.entries.opened())

    @property
    def sequences(self):
        return [enter.sequences for enter in self.entries._entered.values()]


class Watched(Allowances):
    """Compares each answer with that of the plain sums."""

    world: "Relays"

    def _answer(self, record):
        expected = self.world.expect(record)
        self.world.answers.clear()
        super()._answer(record)
        assert [type(each) for each in self.world.answers] == expected


class Relays:
    def __init__(self, relays, requests, tokens, usd):
        self.loop = asyncio.new_event_loop()
        self.now_s, self.term = 1000.0, 0
        self.requests, self.tokens, self.usd_limit = requests, tokens, usd
        self.numbers = count(1)
        self.relays = {number: Relay(number) for number in islice(self.numbers, relays)}
        self.settled_usd, self.answers, self.exceeded = 0.0, [], False
        self.another_takes_over(0, 0)
        self.loop.run_until_complete(self.allowances.refresh())

    def stop(self):
        for each in (one for relay in self.relays.values() for one in relay.open):
            each.entering.cancel()
        self.cycle()
        self.loop.close()

    def cycle(self):
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    def relay(self, at):
        return list(self.relays.values())[at % len(self.relays)]

    # Plain sums

    def counted(self):
        first = int(self.now_s) - 60
        recent = [each for each in self.log if each["second"] >= first]
        return len(recent), sum(each["tokens"] for each in recent)

    def reserved_usd(self):
        return USD_PER_TOKEN * sum(each["predicted"] for each in self.open.values())

    def open_sequences(self):
        return sum(each["sequences"] for each in self.open.values())

    def refill(self):
        self.level = min(PER_MINUTE, self.level + (self.now_s - self.refilled_s) * PER_MINUTE / 60)
        self.refilled_s = self.now_s

    def expect(self, record):
        """Count *record* as one process would; return the types of the answers to it."""
        number = record.number
        if isinstance(record, port.Leave):
            one = self.open.pop(number, None) or self.left.pop(number, None)
            if one is not None:
                one["tokens"] = record.tokens
                if record.model:
                    one["second"], one["model"] = int(self.now_s), record.model
                self.settled_usd += USD_PER_TOKEN * record.tokens
                self.level = min(PER_MINUTE, self.level + one["predicted"] - record.tokens)
            return []
        entered = [] if record.held else [port.Entered]
        if number in self.open:
            return entered
        if (one := self.left.pop(number, None)) is not None:
            if record.held:
                self.open[number] = one
                self.refill()
                return []
            self.log.remove(one)
            self.level = min(PER_MINUTE, self.level + one["predicted"])
        requests, tokens = self.counted()
        fits = requests + 1 <= self.requests and (tokens + record.tokens <= self.tokens or tokens <= 0)
        fits = fits and self.settled_usd + self.reserved_usd() < self.usd_limit
        open_sequences = self.open_sequences()
        if fits or record.held:
            fits = not (open_sequences and open_sequences + record.sequences > SEQUENCES)
            if fits or record.held:
                self.refill()
                fits = self.level >= min(record.tokens, PER_MINUTE)
        if not fits and not record.held:
            return [port.NotEntered]
        one = {"second": int(self.now_s), "tokens": record.tokens, "predicted": record.tokens}
        one |= {"sequences": record.sequences, "model": "m"}
        self.open[number] = one
        self.log.append(one)
        self.level -= record.tokens
        return entered

    # What happens

    def arrives(self, at, tokens):
        relay = self.relay(at)
        one = request(next(relay.numbers), 1 + tokens % 120, (1, 1, 1, 2, 3, 9)[tokens % 6])

        async def enter():
            one.entering = asyncio.ensure_future(relay.entries.enter(one))

        self.loop.run_until_complete(enter())
        relay.open.append(one)

    def leaves(self, at, used):
        """It ends, or its caller goes, perhaps while it waits to enter; or it was refused."""
        relay = self.relay(at)
        if not relay.open:
            return
        one = relay.open.pop(used % len(relay.open))
        entered = one.asked.number in relay.entries._entered
        one.prompt_tokens, one.fell_back = used if entered else 0, used % 3 == 0 and entered
        one.asked.model = "n" if one.fell_back else "m"
        one.entering.cancel()
        self.cycle()
        if not one.entering.cancelled():
            one.entering.exception()
        relay.entries.leave(one)

    def dispatcher_reads(self, at, most):
        out = self.relay(at).out
        for _ in range(min(1 + most % 5, len(out))):
            self.allowances.take(out.popleft())

    def relay_reads(self, at, most):
        relay = self.relay(at)
        for _ in range(min(1 + most % 5, len(relay.into))):
            relay.entries.on_event(relay.into.popleft())
        self.cycle()

    def time_passes(self, at, which):
        """Relays register within the time for it, or they are given up."""
        for relay in self.relays.values():
            if not relay.registered:
                relay.register()
                while relay.out:
                    self.allowances.take(relay.out.popleft())
        self.now_s += (0.3, 1.0, 5.0, 20.0, 61.0)[which % 5]

    def rows_are_read_again(self, at, which):
        left = {number: each for number, each in self.left.items() if self.now_s - each["left_s"] <= 60}
        self.loop.run_until_complete(self.allowances.refresh())
        self.left = left if self.allowances.ready else {}

    def a_relay_is_silent(self, at, which):
        """It is dead, and started again; or it registers again, and goes on with what it has open."""
        relay = self.relay(at)
        self.allowances.forget(relay.number)
        for number in [each for each in self.open if port.relay_of(each) == relay.number]:
            one = self.left[number] = self.open.pop(number)
            one["left_s"] = self.now_s
        if which % 2:
            relay.lose()
            self.exceeded = True
            return
        for one in self.relays.pop(relay.number).open:
            one.entering.cancel()
        started = Relay(next(self.numbers))
        self.relays[started.number] = started

    def another_takes_over(self, at, which):
        """What was on its way to the other is lost, but for ends."""
        self.term += 1
        term = self.term
        self.open, self.left, self.log = {}, {}, []
        self.level, self.refilled_s = PER_MINUTE, self.now_s
        rows = [
            terms(1, BudgetKind.REQUESTS, self.requests),
            terms(2, BudgetKind.TOKENS, self.tokens),
            terms(3, BudgetKind.USD, self.usd_limit),
            terms(4, BudgetKind.TOKENS, None, model="n"),
        ]
        budgets = Rows(lambda: self.now_s, rows, self.settled_usd)
        registered_s = self.now_s + (REGISTERING_S if term > 1 else 0.0)
        self.allowances = Watched(budgets, self.deliver, lambda: term, lambda: self.now_s >= registered_s)
        self.allowances.world = self
        for relay in self.relays.values() if term > 1 else ():
            relay.lose()

    def everything_arrives(self):
        self.time_passes(0, 2)
        self.loop.run_until_complete(self.allowances.refresh())
        for at in range(len(self.relays)):
            for _ in range(100):
                self.dispatcher_reads(at, 4)
                self.relay_reads(at, 4)

    def deliver(self, record):
        if isinstance(record, port.Spent):
            for relay in self.relays.values():
                relay.into.append(record)
        else:
            self.answers.append(record)
            if (relay := self.relays.get(port.relay_of(record.number))) is not None and relay.registered:
                relay.into.append(record)

    # What always holds

    def exactly_what_one_process_would_count(self):
        if not self.allowances.ready:
            return
        assert self.allowances.limits.sequences(1) == self.open_sequences()
        if (use := self.allowances.limits._use.get(1)) is not None and use.refilled_s >= 0:
            assert use.tokens == pytest.approx(self.level)
        budgets = self.allowances.budgets
        used = {pk: each.used(self.now_s, budgets.wall_clock()) for pk, each in budgets.uses.items()}
        requests, tokens = self.counted()
        of_n = [each["tokens"] for each in self.log if each["model"] == "n" and each["second"] >= int(self.now_s) - 60]
        expected = {1: requests, 2: tokens, 3: self.settled_usd + self.reserved_usd(), 4: sum(of_n)}
        assert used == pytest.approx(expected)
        assert bool(self.allowances._spent) == (budgets.spent() != [])

    def no_more_runs_than_the_limit(self):
        """Whatever is on its way: what relays that are not given up have open."""
        relays = self.relays.values()
        running = [each for relay in relays for each in relay.sequences]
        if sum(running) <= SEQUENCES and all(relay.registered and not relay.out for relay in relays):
            self.exceeded = False  # by a relay that was given up, and came back
        assert self.exceeded or sum(running) <= SEQUENCES or len(running) == 1

    WEIGHTS = {
        arrives: 8,
        dispatcher_reads: 8,
        relay_reads: 8,
        leaves: 4,
        rows_are_read_again: 4,
        time_passes: 3,
        a_relay_is_silent: 1,
        another_takes_over: 1,
    }


STEPS = [step for step, weight in Relays.WEIGHTS.items() for _ in range(weight)]


@given(
    relays=st.integers(1, 4),
    limits=st.tuples(st.integers(2, 30), st.integers(50, 900), st.floats(1, 20)),
    steps=st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 999)), min_size=60, max_size=150
    ),
)
@costly(100)
def test_limits_and_budgets_hold_over_all_relays(relays, limits, steps):
    world = Relays(relays, *limits)
    try:
        for step, at, which in steps:
            step(world, at, which)
            world.exactly_what_one_process_would_count()
            world.no_more_runs_than_the_limit()
        world.everything_arrives()
        assert all(one.entering.done() for relay in world.relays.values() for one in relay.open)
        for at, relay in enumerate(world.relays.values()):
            while relay.open:
                world.leaves(at, 0)
        world.everything_arrives()
        world.exactly_what_one_process_would_count()
        assert not world.open
    finally:
        world.stop()


def in_one_process(*rows, owns=lambda: 1):
    """Entries whose dispatcher is in their process."""
    entries = Entries(None, count(1 << 50).__next__)
    allowances = Allowances(Rows(lambda: 1000.0, rows), entries.on_event, owns)
    entries.send = allowances.take
    return entries, allowances


async def test_in_one_process_nobody_waits():
    entries, allowances = in_one_process(terms(2, BudgetKind.TOKENS, 100.0, soft=50.0))
    await allowances.refresh()
    one, other = request(1, tokens=60), request(2, tokens=60)
    assert entries.enter(one) is None
    assert one.budget_warnings == ("acme: 60.00 of its limit",)
    with pytest.raises(ApiError) as refused:
        entries.enter(other)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert (b"x-budget", b"acme: its limit") in refused.value.headers()
    assert await entries.sequences(1) == 1
    entries.leave(other)  # which has nothing
    one.output_tokens = 5
    entries.leave(one)
    assert await entries.sequences(1) == 0
    assert entries.enter(other) is None


async def test_a_batch_takes_nothing_of_its_tenants_limits():
    entries, allowances = in_one_process()
    await allowances.refresh()
    for number in range(SEQUENCES + 3):
        entries.enter(request(number, rates=False))
    assert await entries.sequences(1) == 0
    assert entries.enter(request(99, sequences=SEQUENCES)) is None


async def test_without_a_dispatcher_a_request_waits_as_long_as_it_may(monkeypatch):
    monkeypatch.setattr(entries_module, "ENTER_S", 0.05)
    entries, allowances = in_one_process(owns=lambda: 0)
    for max_wait_s in (None, 0.01):
        one = request(1, max_wait_s=max_wait_s)
        with pytest.raises(ApiError) as refused:
            await entries.enter(one)
        assert (refused.value.status, refused.value.code) == (503, "limits_unavailable")
        entries.leave(one)
    assert not entries._asked
    allowances.term = lambda: 1  # it takes over
    entering = asyncio.ensure_future(entries.enter(request(2, max_wait_s=60.0)))
    await asyncio.sleep(0)
    assert not entering.done()
    await allowances.refresh()
    await entering


async def test_relays_hear_of_budgets_that_are_spent():
    entries, allowances = in_one_process(terms(3, BudgetKind.USD, 1.0, model="m"))
    await allowances.refresh()
    one = request(1)
    entries.enter(one)
    assert not entries.spent(1, 7, "m")
    one.output_tokens = 100
    entries.leave(one)
    assert entries.spent(1, 7, "m")
    assert not entries.spent(1, 7, "n")
    assert not entries.spent(2, 8, "m")
    allowances.budgets.rows = []
    await allowances.refresh()
    assert not entries.spent(1, 7, "m")


async def test_an_owner_that_lapses_and_owns_again_has_counted_on():
    """Nobody else has counted meanwhile."""
    owned = [5]
    entries, allowances = in_one_process(owns=lambda: owned[0])
    await allowances.refresh()
    for number in range(2):
        entries.enter(request(number))
    owned[0] = 0
    entries.leave(request(0))
    await allowances.refresh()
    owned[0] = 5
    await allowances.refresh()
    assert await entries.sequences(1) == 1


async def test_what_came_and_left_while_nobody_was_the_first_dispatcher_holds_nothing():
    """As where the database was away for longer than the right of an owner, which is the same afterwards."""
    term = [1]
    entries, allowances = in_one_process(owns=lambda: term[0])
    await allowances.refresh()
    before, during, after = request(1), request(2, max_wait_s=0.01), request(3)
    assert entries.enter(before) is None
    term[0] = 0
    with pytest.raises(ApiError):
        await entries.enter(during)
    for one in (during, before):
        entries.leave(one)
    term[0] = 1
    assert entries.enter(after) is None
    await allowances.refresh()
    assert await entries.sequences(1) == 1
