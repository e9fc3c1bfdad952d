"""The planner that strategies follow: what it asks for, and that there is always a plan in force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.planning import advisor
from scheduling.planning.advisor import (
    STALE_PERIODS,
    Band,
    Demand,
    EndpointDemand,
    PlanInputs,
    PlanSettings,
    SimulatedPlanner,
    make_plan,
)
from scheduling.planning.capacity import LEAST_LEFT_S, Capability
from scheduling.planning.places import Deployed, Fleet
from scheduling.planning.planner import solve
from scheduling.planning.programme import SolverLost
from scheduling.scaling import STRATEGIES, PlansFor, make_strategy
from scheduling.scaling.each import forecast_words
from tests.scheduling.scaling.views import view

LLAMA, BLOOM, WEST = ("llama", "east"), ("bloom", "east"), ("llama", "west")
ABLE = Capability(100.0, 100.0, 100.0, "measured")
MEAN, TWO, BY_CAPABILITY = PlansFor(), PlansFor(0.0, 0.0, two_plans=True), PlansFor(by_capability=True)
WINDOW_S = 600.0


def band(*values: float) -> Band:
    return Band(np.array(values), 2 * np.array(values))


NOT_ASKED_FOR = EndpointDemand.of(band(*[0.0] * 6), band(*[0.0] * 6), MEAN)


def demand(of, start_s: float = 0.0, window_s: float = WINDOW_S) -> Demand:
    """Return demand of prompt tokens only, by endpoint: the planned and the mean rate by window."""
    none = {endpoint: band(*[0.0] * len(values)) for endpoint, (_, values) in of.items()}
    return Demand(
        start_s,
        window_s,
        {end: EndpointDemand.of(band(*values), none[end], plans_for) for end, (plans_for, values) in of.items()},
    )


def fleet(most: int = 20, units: int | None = None, **instances: int) -> Fleet:
    row = Deployed(instances=1, spot=0, min_instances=1, max_instances=most, gpus=1, usd_per_hour=1.0)
    counts = instances or {"llama": 1, "bloom": 1}
    return Fleet(
        {(name, "east", "gpu"): replace(row, instances=count) for name, count in counts.items()},
        {} if units is None else {("east", "gpu"): units},
    )


def planned(of, now_s: float = 0.0, fleet: Fleet = fleet(), settings: PlanSettings = PlanSettings(epsilon=1.0), **more):  # noqa: B008
    follows = {model: plans_for for (model, _), (plans_for, _) in of.items()}
    capability = {(model, "gpu"): ABLE for model in fleet.models}
    return make_plan(now_s, PlanInputs(demand(of, **more), fleet, capability, follows, settings)).endpoints


def llama_planned(of, able: Capability = ABLE, plans_for: PlansFor = MEAN, most: int = 20, **settings):
    """Plan one instance of llama, in the east, for *of*: a `Demand`, or one by endpoint."""
    expected = of if isinstance(of, Demand) else Demand(0.0, WINDOW_S, of)
    given = {("llama", "gpu"): able}, {"llama": plans_for}, PlanSettings(**settings)
    return make_plan(0.0, PlanInputs(expected, fleet(most=most, llama=1), *given)).endpoints[LLAMA]


def llama_planner(demand_at, settings: PlanSettings = PlanSettings(), **more) -> SimulatedPlanner:  # noqa: B008
    given = fleet(llama=1), {("llama", "gpu"): ABLE}, {"llama": MEAN}, settings
    return SimulatedPlanner(
        lambda now_s, views: PlanInputs(demand_at(now_s), *given), {"llama": MEAN}, settings, **more
    )


def test_a_band_is_read_between_its_mean_and_its_upper_end_and_never_below_nothing():
    assert band(10.0, 20.0).level(0.0).tolist() == [10.0, 20.0]
    assert band(10.0, 20.0).level(0.7).tolist() == pytest.approx([17.0, 34.0])
    assert Band(np.array([-5.0]), np.array([5.0])).level(0.25).tolist() == [0.0]


def test_an_endpoint_is_planned_for_the_level_that_its_strategy_asks_for():
    each = EndpointDemand.of(band(100.0), band(50.0), PlansFor(soon=0.5, kept=1.0), 7.0)
    assert (each.kept.tolist(), each.soon.tolist(), each.prompt.tolist()) == ([300.0], [225.0], [200.0])
    assert each.beta_tokens_per_s == 7.0


def test_the_highest_window_is_kept_for():
    made = planned({LLAMA: (MEAN, [100.0, 450.0, 50.0]), BLOOM: (MEAN, [0.0, 0.0, 0.0])})
    assert (made[LLAMA].target_instances, made[BLOOM].target_instances) == (5, 1)
    assert made[LLAMA].forecast_tokens_per_s == 450.0
    assert made[LLAMA].advice(0.0).soon_instances is None


@pytest.mark.parametrize(
    ("plans_for", "beta", "now", "instances"),
    [(MEAN, 0.0, 0.0, 2), (MEAN, 0.0, 350.0, 4), (MEAN, 300.0, 350.0, 5), (BY_CAPABILITY, 0.0, 350.0, 4)],
)
def test_it_keeps_what_serves_the_load_of_now_where_less_is_expected(plans_for, beta, now, instances):
    of = {LLAMA: EndpointDemand.of(band(200.0, 200.0), band(0.0, 0.0), plans_for, beta, now_tokens_per_s=now)}
    assert llama_planned(of, plans_for=plans_for).target_instances == instances


def test_the_load_of_now_has_the_reserve_of_forecasts():
    bursty = replace(ABLE, reserve=1.0)
    asked = {"cv": 2.0, "now_tokens_per_s": 0.0}
    forecast = {LLAMA: EndpointDemand.of(band(900.0), band(0.0), MEAN, **asked)}
    now = {LLAMA: EndpointDemand.of(band(0.0), band(0.0), MEAN, **asked | {"now_tokens_per_s": 900.0})}
    assert llama_planned(now, bursty).target_instances == llama_planned(forecast, bursty).target_instances > 9


def test_beta_is_added_to_the_forecast_once():
    of = {LLAMA: EndpointDemand.of(band(400.0), band(0.0), MEAN, 60.0)}
    made = llama_planned(of)
    assert made.target_instances == 5
    assert made.forecast_tokens_per_s == 400.0  # what is observed is held against it, interactive demand
    assert forecast_words(made.advice(0.0)) == "forecast of 400 tok/s and 60 deferred"


@pytest.mark.parametrize(
    ("due", "instances"),
    [
        ([], 5),
        ([(86_400.0, 1e6)], 5),
        ([(7200.0, 1_440_000.0)], 6),
        ([(1800.0, 270_000.0)], 6),
        ([(1800.0, 90_000.0), (3600.0, 450_000.0), (7200.0, 1e6)], 7),
        ([(-60.0, 180_000.0)], 7),
    ],
)
def test_a_plan_has_room_for_what_arrives_and_for_what_waits_by_its_deadline_also_after_the_plan(due, instances):
    """400 tokens/s of interactive work, 100 of deferred, of an instance's 100."""
    of = {LLAMA: EndpointDemand.of(band(*[400.0] * 6), band(*[0.0] * 6), MEAN, 100.0), WEST: NOT_ASKED_FOR}
    expected = Demand(0.0, 600.0, of).with_due({"llama": due}, 0.0)
    assert llama_planned(expected).target_instances == instances
    assert expected.of[WEST].beta_tokens_per_s == 0.0, "shared by the expected demand"


@given(
    arrives=st.floats(0.0, 500.0),
    due=st.lists(st.tuples(st.floats(LEAST_LEFT_S, 86_400.0), st.floats(1.0, 1e7)), min_size=1, max_size=8),
)
def test_the_planned_rate_is_the_least_that_serves_arrivals_and_backlog_by_their_deadlines(arrives, due):
    """By the demand bound of earliest deadline first, for arrivals that go on and are due a day later."""
    of = {LLAMA: EndpointDemand.of(band(400.0), band(0.0), MEAN, arrives)}
    planned = Demand(0.0, 600.0, of).with_due({"llama": due}, 0.0).of[LLAMA].beta_tokens_per_s

    def in_time(rate):
        points = [*(at for at, _ in due), 86_400.0, 1e12]
        needed = [sum(w for by, w in due if by <= at) + arrives * max(0.0, at - 86_400.0) for at in points]
        return all(rate * at >= work * (1 - 1e-6) for at, work in zip(points, needed, strict=True))

    assert in_time(planned)
    assert not in_time(0.99 * planned)


def test_what_waits_has_arrived_besides_where_only_ended_requests_are_counted():
    of = {LLAMA: EndpointDemand.of(band(400.0), band(0.0), MEAN, 30.0)}
    due = {"llama": [(86_400.0, 864_000.0)]}
    counted, ended = (Demand(0.0, 600.0, of).with_due(due, 0.0, over_s) for over_s in (np.inf, 86_400.0))
    assert counted.of[LLAMA].beta_tokens_per_s == 30.0
    assert ended.of[LLAMA].beta_tokens_per_s == 40.0


def test_a_simulated_planner_plans_for_the_share_of_what_is_held_that_it_is_asked_for():
    def made(due_shares):
        planner = llama_planner(lambda now_s: demand({LLAMA: (MEAN, [400.0] * 6)}), due_shares=due_shares)
        held = view(model="llama", region="east")._replace(due=((1800.0, 270_000.0),))
        return planner.advise(0.0, [held])[0].target_instances

    assert (made({"llama": 1.0}), made({"llama": 0.5}), made({})) == (6, 5, 4)


def test_adding_has_a_separate_plan_that_moves_with_time():
    """The plan covers the next twenty minutes and the window of the demand."""
    (made,) = planned({LLAMA: (TWO, [100.0, 200.0, 150.0, 400.0, 300.0, 100.0])}, fleet=fleet(llama=1)).values()
    assert (made.target_instances, list(made.soon_instances)) == (4, [2, 4, 4, 4, 3, 1])
    assert [made.advice(at_s).soon_instances for at_s in (-1.0, 0.0, 599.0, 600.0, 2400.0, 99_000.0)] == [
        2,
        2,
        2,
        4,
        3,
        1,
    ]


def test_a_window_is_planned_when_it_is_looked_at_and_once(monkeypatch):
    solved = []
    monkeypatch.setattr(advisor, "solve", lambda problem, **given: solved.append(problem) or solve(problem, **given))
    endpoints = planned({LLAMA: (TWO, [100.0, 200.0, 150.0, 400.0, 300.0, 100.0])}, fleet=fleet())
    made = endpoints[LLAMA]
    solved.clear()
    assert (len(made.soon_instances), len(solved)) == (6, 0)
    assert [made.advice(at_s).soon_instances for at_s in (0.0, 15.0, 599.0)] == [2, 2, 2]
    assert len(solved) == 1
    assert made.soon_instances[-1] == 1
    assert made.soon_instances[1:4] == [4, 4, 4]
    assert len(solved) == 3  # windows that need the same are one
    assert list(made.soon_instances) == [2, 4, 4, 4, 3, 1]
    with pytest.raises(IndexError):
        made.soon_instances[6]


def test_without_a_plan_in_time_what_is_kept_is_added_and_a_former_plan_stays_in_force(monkeypatch):
    made = planned({LLAMA: (TWO, [100.0, 400.0])}, fleet=fleet(llama=1))[LLAMA]

    def lost(*_, **more):
        raise SolverLost("no time")

    planner = llama_planner(lambda now_s: demand({LLAMA: (MEAN, [400.0] * 6)}))
    (before,) = planner.advise(0.0, [view()])
    monkeypatch.setattr(advisor, "solve", lost)
    planner.make = lost
    assert list(made.soon_instances) == [4, 4]
    assert planner.advise(3600.0, [view()]) == [before]


def test_it_never_asks_to_add_more_than_is_kept():
    made = planned({LLAMA: (PlansFor(soon=1.0, kept=0.0, two_plans=True), [400.0, 400.0])}, fleet=fleet(llama=1))
    assert list(made[LLAMA].soon_instances) == [4, 4]


def test_models_with_one_plan_keep_their_gpus_while_others_have_two():
    of = {LLAMA: (TWO, [100.0, 100.0, 100.0, 500.0]), BLOOM: (MEAN, [300.0] * 4)}
    made = planned(of, fleet=fleet(units=8))
    assert (made[LLAMA].target_instances, list(made[LLAMA].soon_instances)) == (5, [1, 5, 5, 5])
    assert (made[BLOOM].target_instances, list(made[BLOOM].soon_instances)) == (3, [])


class TestAlgorithm2:
    def test_n_is_for_the_next_window_by_the_limit_that_is_reached_first(self):
        able = Capability(100.0, 10.0, 200.0, "measured")
        of = {LLAMA: EndpointDemand.of(band(900.0, 300.0, 900.0), band(0.0, 55.0, 0.0), BY_CAPABILITY)}
        made = llama_planned(of, able, BY_CAPABILITY, period_s=600.0)
        assert (made.target_instances, made.forecast_tokens_per_s) == (6, 355.0)
        made = llama_planned(of, able, BY_CAPABILITY, period_s=1200.0)
        assert made.target_instances == 9  # its successor comes after both windows

    def test_within_the_bounds_and_with_models_of_the_programme(self):
        of = {LLAMA: (BY_CAPABILITY, [0.0, 400.0]), BLOOM: (MEAN, [300.0, 100.0])}
        made = planned(of)
        assert (made[LLAMA].target_instances, made[BLOOM].target_instances) == (4, 3)
        assert planned(of, fleet=fleet(most=2))[LLAMA].target_instances == 2
        assert planned({LLAMA: (BY_CAPABILITY, [9.0, 0.0])}, fleet=fleet(llama=7))[LLAMA].target_instances == 1

    def test_gpus_that_are_not_there_are_not_planned_with(self):
        made = planned({LLAMA: (BY_CAPABILITY, [0.0, 400.0]), BLOOM: (MEAN, [100.0, 100.0])}, fleet=fleet(units=3))
        assert made[LLAMA].target_instances + made[BLOOM].target_instances <= 3

    def test_work_that_no_number_can_serve_gets_as_many_as_there_may_be(self):
        of = {LLAMA: EndpointDemand.of(band(1.0, 1.0), band(1.0, 1.0), BY_CAPABILITY)}
        able = Capability(100.0, 0.0, 100.0, "measured")
        assert llama_planned(of, able, BY_CAPABILITY, most=3).target_instances <= 3

    @pytest.mark.parametrize("name", ["proactive", "hybrid", "preserve"])
    def test_preserves_strategies_have_it(self, name):
        assert make_strategy(name).plans_for.by_capability
        assert not make_strategy("lt_ua").plans_for.by_capability


class TestInForce:
    """A plan is in force until its successor is."""

    def planner(self, offset_s: float, period_s: float, windows: int, window_s: float = WINDOW_S) -> SimulatedPlanner:
        """Windows begin at *offset_s* and every *window_s*: plans are made anywhere within one."""

        def demand_at(now_s: float) -> Demand:
            start_s = (now_s - offset_s) // window_s * window_s + offset_s
            return demand({LLAMA: (MEAN, [100.0] * windows)}, start_s=start_s, window_s=window_s)

        return llama_planner(demand_at, PlanSettings(period_s))

    @pytest.mark.parametrize("name", STRATEGIES)
    def test_nor_at_the_period_of_any_strategy_even_if_its_successor_is_a_period_late(self, name):
        plans_for, made_s = make_strategy(name).plans_for, 60.0
        for offset_s in (0, 120, 480):
            start_s = (made_s - offset_s) // WINDOW_S * WINDOW_S + offset_s
            (made,) = planned({LLAMA: (plans_for, [100.0] * 6)}, made_s, fleet(llama=1), start_s=start_s).values()
            assert made.period_s == plans_for.period_s
            assert made.valid_until_s >= made_s + 2 * plans_for.period_s

    @pytest.mark.parametrize(("period_s", "windows"), [(3600.0, 1), (900.0, 1), (600.0, 1), (1200.0, 5), (3600.0, 6)])
    def test_no_minute_is_without_a_plan_at_any_offset_of_windows(self, period_s, windows):
        for offset_s in (0.0, 60.0, 300.0, 540.0):
            planner, made_at_s = self.planner(offset_s, period_s, windows), set()
            for now_s in np.arange(0.0, 3 * period_s, 60.0).tolist():
                (advice,) = planner.advise(now_s, [view()])
                assert advice.made_at_s <= now_s <= advice.valid_until_s, offset_s
                assert now_s < advice.next_plan_s, offset_s
                made_at_s.add(advice.made_at_s)
            assert made_at_s == {0.0, period_s, 2 * period_s}, offset_s

    def test_models_are_planned_each_at_the_period_of_its_strategy(self):
        hourly, often = make_strategy("lt_ua").plans_for, make_strategy("pilothouse").plans_for
        seen = []

        able = {("llama", "gpu"): ABLE, ("bloom", "gpu"): ABLE}
        given = {"llama": hourly, "bloom": often}, PlanSettings()

        def inputs_at(now_s, views):
            seen.append(now_s)
            expected = demand({LLAMA: (hourly, [100.0] * 6), BLOOM: (often, [900.0] * 6)}, start_s=now_s)
            return PlanInputs(expected, fleet(units=9, llama=2, bloom=3), able, *given)

        planner = SimulatedPlanner(inputs_at, *given)
        made_at_s = {"llama": set(), "bloom": set()}
        for now_s in np.arange(0.0, 7200.0, 300.0).tolist():
            for name, advice in zip(made_at_s, planner.advise(now_s, [view(), view(model="bloom")]), strict=True):
                made_at_s[name].add(advice.made_at_s)
        assert made_at_s == {"llama": {0.0, 3600.0}, "bloom": {1200.0 * at for at in range(6)}}
        # Planned alone it has the GPUs that the other leaves it.
        assert planner.plans[BLOOM].target_instances <= 7
        assert seen == sorted(made_at_s["bloom"])

    def test_what_lies_beyond_the_horizon_is_not_kept_for(self):
        ahead = [100.0, 100.0, 900.0]
        for horizon_s, target in ((1200.0, 1), (1201.0, 9)):
            plans_for = PlansFor(period_s=600.0, horizon_s=horizon_s)
            assert planned({LLAMA: (plans_for, ahead)}, fleet=fleet(llama=1))[LLAMA].target_instances == target

    def test_but_then_it_is_stale(self):
        made = planned({LLAMA: (MEAN, [100.0])}, fleet=fleet(llama=1), settings=PlanSettings(3600.0))[LLAMA]
        assert made.valid_until_s == STALE_PERIODS * 3600.0
        later = planned({LLAMA: (MEAN, [100.0] * 12)}, fleet=fleet(llama=1), settings=PlanSettings(60.0))[LLAMA]
        assert later.valid_until_s == 3600.0  # to the end of its horizon
        seen = planned({LLAMA: (MEAN, [100.0] * 3)}, fleet=fleet(llama=1), settings=PlanSettings(60.0))[LLAMA]
        assert seen.valid_until_s == 1800.0  # or of what is forecast

    def test_of_an_endpoint_that_nothing_is_known_of_there_is_none(self):
        assert self.planner(0.0, 600.0, 1).advise(0.0, [view(model="unknown")]) == [None]


def test_instances_are_those_of_the_views_on_the_deployments_in_their_order():
    row = Deployed(instances=9, spot=9, min_instances=0, max_instances=3, gpus=1, usd_per_hour=1.0)
    both = Fleet({("llama", "east", "a"): row, ("llama", "east", "b"): row, ("llama", "west", "a"): row}, {})
    seen = both.with_instances([view(ready=4, spot=5)])
    assert [(each.instances, each.spot) for each in seen.deployments.values()] == [(3, 0), (1, 0), (0, 0)]
