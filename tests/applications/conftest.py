import functools
import time
from datetime import timedelta

import numpy as np
import pytest
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.applications.models import Application, ApplicationRun
from controlplane.applications.services import follow_runs
from tests import database
from tests.console.conftest import ledger_row
from tests.inventory import *  # noqa: F403 (fixtures)


def write_run(tenant, run, began_at, random, *, application="review", reviews=2, **values):
    """Calls of a run that writes, then reviews: each call begins when the one before has ended."""
    written = int(random.integers(100, 1_000))
    calls = [("write", 300, written), *[("review", 2 * written, 50)] * reviews]
    for unit, prompt_tokens, output_tokens in calls:
        e2e_ms = 500.0 + 20.0 * output_tokens
        ledger_row(
            tenant, arrived_at=began_at, application=application, run=run, unit=unit, prompt_tokens=prompt_tokens,
            output_tokens=output_tokens, e2e_ms=e2e_ms, **values,
        )  # fmt: skip
        began_at += timedelta(milliseconds=e2e_ms + 10)


def learned(tenant, runs=40):
    """An application with *runs* runs that ended three hours ago, or a few minutes more, of one to three reviews.

    What it has learned is found once in a test process, and again only half an hour later.
    """
    database.write(_teach(tenant.name, runs, int(time.monotonic() // 1800)))
    return Application.objects.get(tenant=tenant, name="review")


@functools.cache
def _teach(tenant_name, runs, _half_hour):
    """A function that writes the runs: for the same values the same one, as `database.write` wants."""

    def write():
        tenant, random, now = Tenant.objects.get(name=tenant_name), np.random.default_rng(1), timezone.now()
        for number in range(runs):
            began_at = now - timedelta(hours=3, minutes=number)
            write_run(tenant, f"run-{number}", began_at, random, reviews=int(random.integers(1, 4)))
        follow_runs(now)

    return write


@pytest.fixture
def application(acme):
    return learned(acme)


@pytest.fixture
def running(acme, application):
    """A run that wrote and has not been reviewed."""
    write_run(acme, "now", timezone.now() - timedelta(seconds=25), np.random.default_rng(2), reviews=0)
    follow_runs(timezone.now())
    return ApplicationRun.objects.get(run="now")
