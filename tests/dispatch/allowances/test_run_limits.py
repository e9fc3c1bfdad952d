"""Limits of runs: whatever calls begin and end together, and whoever takes over, no run passes its limit by more than its
calls exceed what they held."""

import asyncio
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.allowances.allowances import Allowances
from controlplane.dispatch.allowances.runs import Amount, RunTerms
from tests.dispatch.allowances.test_allowances import Rows

LIMIT, USD_LIMIT, ASKED_LIMIT = 200, 3.0, 120
PRICES = {(1, "m"): 0.01, (0, "n"): 0.03, (0, ""): 0.02}
RUNS = ("a", "b")


def call(number, run="a", tokens=50, model="m", **more):
    names = {"application": "review", "run": run, "run_tokens": tokens} | more
    return port.Enter(number, 1, 7, model, tokens, 1, 10_000, 0, **names)


class Relays:
    """Two relays whose calls one dispatcher counts after another."""

    def __init__(self, usd=USD_LIMIT):
        self.now_s, self.term, self.numbers, self.usd_limit = 1000.0, 0, Counter(), usd
        self.open: dict[int, port.Enter] = {}
        self.ended = {run: Counter() for run in RUNS}
        self.overrun, self.answers = Counter(), []
        self.take_over()

    async def load(self, begins):
        used = {(1, "review", run): self.ended[run] for run in RUNS} if begins else {}
        return RunTerms({(1, "review"): Amount(LIMIT, self.usd_limit)}, PRICES, used)

    def take_over(self, *_):
        self.term += 1
        term = self.term
        self.allowances = Allowances(Rows(lambda: self.now_s, []), self.answers.append, lambda: term)
        self.allowances.runs.load = self.load
        asyncio.run(self.allowances.refresh())
        for enter in self.open.values():
            self.allowances.take(replace(enter, held=True))

    def refresh(self, *_):
        self.now_s += 30.0
        asyncio.run(self.allowances.refresh())

    def used(self, run):
        return sum(self.ended[run].values()), sum(self.usd(model, count) for model, count in self.ended[run].items())

    def held(self, run):
        mine = [each for each in self.open.values() if each.run == run]
        return sum(each.run_tokens for each in mine), sum(self.usd(each.model, each.run_tokens) for each in mine)

    @staticmethod
    def usd(model, tokens):
        return tokens * PRICES.get((1, model), PRICES.get((0, model), PRICES[0, ""]))

    def begin(self, which, tokens):
        relay, run, model = 1 + which % 2, RUNS[which % 3 == 0], "mno"[which % 3]
        self.numbers[relay] += 1
        asked = ASKED_LIMIT if which % 4 == 0 else None
        enter = call((relay << port.RELAY_BITS) + self.numbers[relay], run, 1 + tokens, model, run_max_tokens=asked)
        tokens_of, usd_of = (done + held + own for done, held, own in zip(
            self.used(run), self.held(run), (enter.run_tokens, self.usd(model, enter.run_tokens)), strict=True
        ))  # fmt: skip
        fits = tokens_of <= min(LIMIT, asked or LIMIT) and usd_of <= self.usd_limit * (1 + 1e-9)
        self.answers.clear()
        self.allowances.take(enter)
        answer = next(each for each in self.answers if not isinstance(each, port.Spent))
        assert isinstance(answer, port.Entered) is fits
        if fits:
            self.open[enter.number] = enter

    def end(self, which, used):
        if not self.open:
            return
        enter = self.open.pop(list(self.open)[which % len(self.open)])
        model = "n" if used % 7 == 0 else ""
        self.ended[enter.run][model or enter.model] += used
        self.overrun[enter.run, "tokens"] += max(0, used - enter.run_tokens)
        own_usd = self.usd(enter.model, enter.run_tokens)
        self.overrun[enter.run, "usd"] += max(0.0, self.usd(model or enter.model, used) - own_usd)
        self.allowances.take(port.Leave(enter.number, used, model))

    def relay_is_silent(self, which, _):
        """It registers again with what it has open."""
        relay = 1 + which % 2
        self.allowances.forget(relay)
        for enter in [each for number, each in self.open.items() if port.relay_of(number) == relay]:
            self.allowances.take(replace(enter, held=True))

    def no_run_passes_its_limit(self):
        for run in RUNS:
            (tokens, usd), (held, held_usd) = self.used(run), self.held(run)
            assert tokens + held <= LIMIT + self.overrun[run, "tokens"]
            assert usd + held_usd <= self.usd_limit + self.overrun[run, "usd"] + 1e-9


STEPS = [Relays.begin] * 8 + [Relays.end] * 5 + [Relays.refresh, Relays.relay_is_silent, Relays.take_over]


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 80)), min_size=10, max_size=60))
def test_no_run_passes_its_limit_whatever_its_calls_do(steps):
    world = Relays()
    for step, which, amount in steps:
        step(world, which, amount)
        world.no_run_passes_its_limit()


def refusal(world, *args, **more):
    world.answers.clear()
    world.allowances.take(call(*args, **more))
    return world.answers[-1]


@pytest.mark.parametrize(
    ("first", "second", "code", "retries"),
    [
        ({"tokens": 150}, {"tokens": 51}, "run_limit_held", True),
        ({"tokens": 150}, {"tokens": 201}, "run_limit_reached", False),
        ({"tokens": 90}, {"tokens": 40, "run_max_tokens": 120}, "run_limit_held", True),
        ({"tokens": 90}, {"tokens": 11, "model": "n", "run_max_usd": 1.0}, "run_limit_held", True),
        ({"tokens": 90}, {"tokens": 40, "model": "n", "run_max_usd": 1.0}, "run_limit_reached", False),
    ],
)
def test_a_call_that_fits_once_others_have_ended_may_be_sent_again(first, second, code, retries):
    world = Relays()
    world.allowances.take(call(1, **first))
    refused = refusal(world, 2, **second)
    assert isinstance(refused, port.NotEntered)
    assert (refused.status, refused.code, refused.retry_after_s is not None) == (429, code, retries)


def test_what_another_limit_refuses_holds_nothing_of_a_run():
    world = Relays()
    world.allowances.take(port.Enter(1, 1, 7, "m", 10, 1, 1, 0))
    world.allowances.take(port.Enter(2, 1, 7, "m", 150, 1, 1, 0, application="review", run="a", run_tokens=150))
    assert world.answers[-1].code == "concurrency_limit_exceeded"
    assert isinstance(refusal(world, 3, tokens=200), port.Entered)


def test_calls_of_a_relay_that_never_comes_back_count_as_they_may_have_used():
    world = Relays()
    world.allowances.take(call(1 << port.RELAY_BITS, tokens=150))
    world.allowances.forget(1)
    for _ in range(3):
        world.refresh()
    refused = refusal(world, 2, tokens=51)
    assert (refused.code, refused.retry_after_s) == ("run_limit_reached", None)
