"""How long a what-if still takes is said from the first phase on, and holds."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.models import FutureSeed, Phase, WhatIfState
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
OTHER = {"name": "Reactive", "changes": [{"kind": "policy", "part": "strategy", "value": "reactive"}]}


@pytest.fixture(autouse=True)
def two_processes(settings):
    settings.WHAT_IF_PROCESSES = 2


def asked(operator, seeds=3):
    return services.submit(rows.draft(operator, OTHER, seeds=seeds), operator)


def done(run, took_s):
    now = timezone.now()
    FutureSeed.objects.filter(pk=run.pk).update(
        state=WhatIfState.DONE, started_at=now - timedelta(seconds=took_s), ended_at=now, result={}
    )


def test_nothing_is_said_before_any_run_was_made(operator):
    assert selectors.progress(asked(operator).pk)["eta_s"] is None


def test_the_pace_of_earlier_runs_says_it_before_the_first_has_ended(operator):
    earlier = asked(operator)
    for run in FutureSeed.objects.all():
        done(run, 4.0)
    earlier.state = WhatIfState.DONE
    earlier.save()
    row = asked(operator)
    seen = selectors.progress(row.pk)
    # Six runs of 4 s by two processes, of which the last two are the third seeds of both.
    assert seen["eta_s"] == 15
    assert [future["eta_s"] for future in seen["futures"]] == [15, 15]
    first = FutureSeed.objects.filter(future__what_if=row, seed=1, future__letter="A")
    first.update(state=WhatIfState.RUNNING, phase=Phase.STAGING, started_at=timezone.now() - timedelta(seconds=2))
    assert selectors.progress(row.pk)["eta_s"] in (10, 15)


def test_a_longer_horizon_takes_longer(operator):
    earlier = asked(operator, seeds=1)
    for run in FutureSeed.objects.all():
        done(run, 4.0)
    earlier.state = WhatIfState.DONE
    earlier.save()
    row = asked(operator, seeds=1)
    row.horizon_s *= 10
    row.save()
    assert selectors.progress(row.pk)["eta_s"] == 40


def test_own_runs_count_more_than_earlier_ones_and_progress_gives_the_end(operator):
    row = asked(operator, seeds=2)
    runs = {(run.future.letter, run.seed): run for run in FutureSeed.objects.select_related("future")}
    done(runs["A", 1], 2.0)
    done(runs["B", 1], 30.0)
    now = timezone.now()
    FutureSeed.objects.filter(seed=2).update(
        state=WhatIfState.RUNNING, started_at=now - timedelta(seconds=1), progress=0.5
    )
    row.state = WhatIfState.RUNNING
    row.save()
    seen = selectors.progress(row.pk)
    # A: half done after a second, of some 2 s. B: half done after a second, where the first seed took 30 s.
    a_s, b_s = (future["eta_s"] for future in seen["futures"])
    assert 1 <= a_s <= 3
    assert 8 <= b_s <= 10
    assert seen["eta_s"] == b_s
