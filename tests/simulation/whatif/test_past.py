"""A what-if's planners know what was asked in the hour before it begins."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controlplane.fleet.models import SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.planning.forecasts import demand
from controlplane.simulation.planner import planner_of
from controlplane.simulation.whatif.start import Start, stage_start
from controlplane.simulation.whatif.starts.past import MINUTES, as_arrays, past_demand
from scheduling.simulation.scenario import Scenario
from tests.simulation.whatif import rows

AT = datetime(2026, 3, 1, 12, 0, 45, tzinfo=UTC)
LAST = AT.replace(second=0) - timedelta(minutes=1)
"""The newest minute whose requests are all counted."""


def minute(ago, model="m", region="east", slo_class="interactive", **values):
    MinuteRow.objects.create(
        minute=LAST - timedelta(minutes=ago), model=model, region=region, slo_class=slo_class, **values
    )


@pytest.mark.django_db
def test_the_last_hour_by_the_region_of_the_callers(monkeypatch):
    monkeypatch.setattr(demand, "endpoints", lambda: [("m", "east"), ("m", "north"), ("m", "west")])
    for name, kind in (("batch", SloKind.NON_INTERACTIVE), ("spare", SloKind.OPPORTUNISTIC)):
        SloClass.objects.create(name=name, kind=kind)
    minute(0, requests=3, prompt_tokens=600, output_tokens=60)
    minute(0, region="west", own_region="east", requests=1, prompt_tokens=60, unserved_output_tokens=6)
    minute(59, requests=1, prompt_tokens=6)
    minute(60, requests=9, prompt_tokens=9000)  # too old
    minute(-1, requests=9, prompt_tokens=9000)  # not complete
    minute(5, slo_class="batch", requests=4, prompt_tokens=1200, output_tokens=600)
    minute(5, slo_class="spare", requests=4, prompt_tokens=777)
    minute(7, region="west", requests=1, output_tokens=120)
    past = past_demand(AT)
    assert [(each.model, each.region) for each in past] == [("m", "east"), ("m", "west")]
    east, _ = past
    assert (east.prompt[-1], east.output[-1], east.requests[-1]) == (660, 66, 4)
    assert (east.prompt[0], sum(east.prompt), sum(east.requests)) == (6, 666, 5)
    assert east.other[-6] == sum(east.other) == 1800
    arrays = as_arrays(past, [("m", "west"), ("n", "west"), ("m", "east")])
    assert arrays.prompt.shape == (3, MINUTES)
    assert arrays.output[0, -8] == 2.0  # a second
    assert not arrays.prompt[1].any()
    assert arrays.other[2, -6] == 30.0


def first_forecast(past, **forecast):
    """Return tokens per second by endpoint of the first plan."""
    scenario = rows.start(
        scaling={"strategy": "lt_ua", "min_instances": 1, "max_instances": 4},
        forecast=forecast,
        planner={"period_s": 60.0},
    )
    start = Start.model_validate(scenario | {"past": past})
    staged = stage_start(start, Scenario.model_validate(start.scenario), 1)
    planner = planner_of(staged)
    staged.run(advisor=planner)
    plan = planner.made[0]
    assert plan.inputs.demand.start_s == 0.0
    return {key: each.mean for key, each in plan.inputs.demand.of.items()}


def asked(region, tokens):
    return {"model": "m", "region": region} | {
        "prompt": [tokens * 60] * MINUTES, "output": [60] * MINUTES, "requests": [6] * MINUTES, "other": [0] * MINUTES,
    }  # fmt: skip


@pytest.mark.parametrize("window_s", [60, 600, 3600])
def test_the_first_plan_is_for_what_was_asked_before(window_s):
    regions = ("east", "west")
    forecasts = first_forecast([asked("east", 300), asked("west", 20)], window_s=window_s, forecaster="blend")
    for region, tokens in zip(regions, (301.0, 21.0), strict=True):
        assert forecasts["m", region] == pytest.approx(np.full_like(forecasts["m", region], tokens), rel=0.1)
    assert not any(each.any() for each in first_forecast([], window_s=window_s, forecaster="blend").values())
