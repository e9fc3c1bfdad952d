"""How long a what-if still takes is said from the first phase on, and holds."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.models import FutureSeed, WhatIfState
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


def test_earlier_runs_give_the_time_until_own_ones_have_ended(operator):
    earlier = asked(operator)
    for run in FutureSeed.objects.all():
        done(run, 4.0)
    earlier.state = WhatIfState.DONE
    earlier.save()
    row = asked(operator)
    assert selectors.progress(row.pk)["eta_s"] == 15  # six runs of 4 s by two processes
    first, second, *_ = FutureSeed.objects.filter(future__what_if=row)
    done(first, 10.0)
    FutureSeed.objects.filter(pk=second.pk).update(state=WhatIfState.RUNNING, progress=0.5)
    row.state = WhatIfState.RUNNING
    row.save()
    assert selectors.progress(row.pk)["eta_s"] == 25  # four and a half runs of 10 s
