"""Demand as series: minute rows put into windows."""

from datetime import timedelta

import numpy as np
import pytest

from controlplane.fleet.models import Model, SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.planning.forecasts import demand, selectors
from controlplane.planning.forecasts.demand import TOKENS
from controlplane.planning.models import Quantity
from tests.planning.conftest import NOW, PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("minute_windows")]


class TestDemand:
    @pytest.mark.sql
    def test_tokens_a_second_by_window_and_quantity(self, make_minutes):
        make_minutes(4)
        series = demand.read(NOW - timedelta(minutes=4), NOW, 60)
        assert series.start == NOW.replace(minute=56, second=0) - timedelta(hours=1)
        assert series.of(PLACE, Quantity.PROMPT).tolist() == [1000.0] * 4
        assert series.of(PLACE, Quantity.OUTPUT).tolist() == [200.0] * 4
        assert series.known == 4

    def test_demand_is_of_the_callers_region_and_holds_what_was_not_served(self, make_minutes):
        """In old rows the caller's region is the region that served."""
        make_minutes(2)
        make_minutes(2, prompt=6_000, output=600, region="us-west", own_region=PLACE[1])
        make_minutes(2, prompt=0, output=0, own_region="us-west", unserved=1, unserved_prompt_tokens=60_000)
        make_minutes(
            2,
            prompt=0,
            output=0,
            slo_class="flexible",
            unserved=3,
            unserved_prompt_tokens=600,
            unserved_output_tokens=60,
        )
        since = NOW.replace(second=0) - timedelta(minutes=2)
        series = demand.read(since, NOW, 60)
        assert series.of(PLACE, Quantity.PROMPT).tolist() == [1110.0] * 2
        assert series.of(PLACE, Quantity.OUTPUT).tolist() == [211.0] * 2
        starts = selectors.grid(since, NOW.replace(second=0), 60)
        assert selectors.demand(*PLACE, Quantity.PROMPT, starts, 60) == [1110.0] * 2
        now_by_series = selectors.demand_now(Quantity.PROMPT, NOW)
        assert now_by_series == {PLACE: 1110.0, (PLACE[0], "us-west"): 1000.0}

    @pytest.mark.sql
    def test_interactive_classes_are_added_up_and_deferred_ones_separately(self, make_minutes):
        SloClass.objects.create(name="flexible", title="Flexible", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
        make_minutes(3)
        make_minutes(3, prompt=12_000, slo_class="chat")
        make_minutes(1, prompt=6_000, output=0, slo_class="flexible")
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=2)).delete()
        series = demand.read(NOW - timedelta(minutes=3), NOW, 60)
        np.testing.assert_equal(series.of(PLACE, Quantity.PROMPT), [1200.0, np.nan, 1200.0])
        np.testing.assert_equal(series.of(PLACE, Quantity.PROMPT, demand.DEFERRED), [0.0, np.nan, 100.0])
        assert series.known == 2

    def test_all_classes_are_read_at_once(self, make_minutes, django_assert_num_queries):
        for name in ("interactive", "flexible", "idle"):
            make_minutes(2, slo_class=name)
        with django_assert_num_queries(3):  # the deployments, the other classes, and the rows
            series = demand.read(NOW - timedelta(minutes=2), NOW, 60)
        assert set(series.of(PLACE, Quantity.PROMPT)) == {3000.0}, "no class says otherwise"

    def test_an_uncounted_minute_is_a_gap_and_one_with_only_other_series_a_zero(self, make_minutes):
        make_minutes(3)
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=2)).delete()
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=3)).update(model="another")
        series = demand.read(NOW - timedelta(minutes=3), NOW, 60).of(PLACE, Quantity.PROMPT)
        assert series[0] == 0.0
        assert np.isnan(series[1])
        assert series[2] == 1000.0

    def test_a_wide_window_has_the_mean_of_its_known_minutes(self, make_minutes):
        make_minutes(20, until=NOW.replace(hour=12))
        MinuteRow.objects.filter(minute__minute=45).delete()
        series = demand.read(NOW - timedelta(minutes=20), NOW, 600).of(PLACE, Quantity.PROMPT)
        assert series.tolist() == [1000.0, 1000.0]

    def test_the_window_that_is_still_filling_is_left_out(self):
        assert demand.last_complete(NOW, 60) == NOW.replace(second=0)
        assert demand.last_complete(NOW - timedelta(seconds=20), 60) == NOW.replace(second=0) - timedelta(minutes=1)

    @pytest.mark.parametrize(("deadline_s", "rate"), [(600, 100.0), (7200, 50.0)])
    def test_deferred_work_is_averaged_over_its_deadline_of_the_minutes_that_were_counted(
        self, make_minutes, deadline_s, rate
    ):
        SloClass.objects.create(name="flexible", title="Flexible", kind=SloKind.NON_INTERACTIVE, deadline_s=deadline_s)
        make_minutes(120)
        make_minutes(60, prompt=6_000, output=0, slo_class="flexible")
        series = demand.read(NOW - timedelta(days=1), NOW, 60)
        assert series.rate(PLACE, demand.deferred_over_s(), demand.DEFERRED) == pytest.approx(rate)

    def test_what_can_wait_is_counted_once_in_a_plan_and_what_takes_the_rest_never(self, make_minutes, settings):
        for name, kind in (("flexible", SloKind.NON_INTERACTIVE), ("idle", SloKind.OPPORTUNISTIC)):
            SloClass.objects.create(name=name, title=name, kind=kind, deadline_s=3600)
            make_minutes(10, prompt=6_000_000, output=0, slo_class=name)
        make_minutes(10)
        since = NOW - timedelta(minutes=10)
        series = demand.read(since, NOW, 60)
        assert set(series.of(PLACE, Quantity.PROMPT)) == {1000.0}
        assert set(series.of(PLACE, Quantity.PROMPT, demand.DEFERRED)) == {100_000.0}
        starts = selectors.grid(since, NOW.replace(second=0), 60)
        assert set(selectors.demand(*PLACE, Quantity.PROMPT, starts, 60)) == {1000.0}
        assert selectors.demand_now(Quantity.PROMPT, NOW) == {PLACE: 1000.0}
        assert selectors.demand_now(Quantity.PROMPT, NOW, "idle") == {PLACE: 100_000.0}
        assert series.rate(PLACE, 600.0, demand.DEFERRED) == pytest.approx(100_000.0)
        of_group = {"": 1000.0, demand.DEFERRED: 100_000.0, demand.EVERY_CLASS: 101_000.0}
        for group, rate in of_group.items():
            assert selectors.demand_now(Quantity.PROMPT, NOW, group) == {PLACE: rate}
            assert set(selectors.demand(*PLACE, Quantity.PROMPT, starts, 60, group)) == {rate}
        assert set(series.of(PLACE, Quantity.PROMPT, demand.DEFERRED)) == {100_000.0}

    def test_demand_that_was_not_served_in_its_callers_region(self, make_minutes):
        make_minutes(2)
        make_minutes(2, prompt=6_000, region="us-west", own_region=PLACE[1])
        make_minutes(2, slo_class="late", prompt=0, unserved=1, unserved_prompt_tokens=600)
        assert selectors.not_served_here(Quantity.PROMPT, NOW) == {PLACE: selectors.NotServedHere(10.0, 100.0)}


@pytest.mark.parametrize("generates", [True, False])
def test_sums_over_the_fleet_leave_out_models_without_output_where_others_generate(make_minutes, generates):
    """A hundred thousand tokens a second of embeddings are not the load of a fleet of chat."""
    Model.objects.create(
        name="vectors", title="Vectors", task="embed", weights_bytes=1, kv_bytes_per_token=1, context_tokens=9
    )
    Model.objects.filter(name=PLACE[0]).update(active=generates)
    make_minutes(10)
    make_minutes(10, model="vectors", prompt=6_000_000, output=0)
    starts = selectors.grid(NOW - timedelta(minutes=5), NOW.replace(second=0), 60)
    rates = {model: set(selectors.demand(model, "", TOKENS, starts, 60)) for model in ("", PLACE[0], "vectors")}
    both = 101_200.0  # what no longer serves was asked for, too
    assert rates == {"": {1200.0 if generates else both}, PLACE[0]: {1200.0}, "vectors": {100_000.0}}
