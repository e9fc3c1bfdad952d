"""Two writers of one row at once: where the other is first between the look and the write, its row is taken, not an error.

And nothing is computed while a transaction holds SQLite's one place for writers.
"""

from datetime import timedelta

import numpy as np
import pytest
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.applications import reporting
from controlplane.applications import services as applications
from controlplane.applications.models import Application, ApplicationRun
from controlplane.jobs import services as jobs
from controlplane.jobs.models import JobRow
from controlplane.tuning import services as tuning
from controlplane.tuning.models import Setting
from controlplane.usage import counting
from controlplane.usage.models import UsageMark
from tests.applications.conftest import write_run
from tests.inventory import *  # noqa: F403 (fixtures)


@pytest.fixture
def other_first(monkeypatch):
    """`other_first(Model, write)`: at the first look for a row of Model that finds none, another process writes it."""

    def race(model, write):
        usual_first, usual_get = QuerySet.first, QuerySet.get
        written = []

        def other(queryset):
            if queryset.model is model and not written:
                written.append(write())

        def first(self):
            row = usual_first(self)
            if row is None:
                other(self)
            return row

        def get(self, *args, **kwargs):
            try:
                return usual_get(self, *args, **kwargs)
            except self.model.DoesNotExist:
                other(self)
                raise

        monkeypatch.setattr(QuerySet, "first", first)
        monkeypatch.setattr(QuerySet, "get", get)
        return written

    return race


def followed_run(acme, _model):
    now = timezone.now()
    write_run(acme, "one", now - timedelta(minutes=10), np.random.default_rng(1), reviews=2)
    application = Application.objects.create(tenant=acme, name="review")
    other = {"application": application, "run": "one", "began_at": now, "last_call_at": now}
    return ApplicationRun, lambda: ApplicationRun.objects.create(**other), lambda: applications.follow_runs(now)


def application_of_a_run(acme, _model):
    now = timezone.now()
    write_run(acme, "one", now - timedelta(minutes=10), np.random.default_rng(1), reviews=2)
    other = {"tenant": acme, "name": "review"}
    return Application, lambda: Application.objects.create(**other), lambda: applications.follow_runs(now)


def reported_run(acme, _model):
    now = timezone.now()
    application = Application.objects.create(tenant=acme, name="review")
    other = {"application": application, "run": "one", "began_at": now, "last_call_at": now}

    def write():
        reporting.open_run(acme, "review", "one", None, now)

    return ApplicationRun, lambda: ApplicationRun.objects.create(**other), write


def setting(_acme, model):
    other = {"name": "SPILL_ABOVE", "model": model, "value": 0.7, "changed_by": "another"}
    return Setting, lambda: Setting.objects.create(**other), lambda: tuning.change("SPILL_ABOVE", 0.8, "t", model=model)


def usage_mark(_acme, _model):
    now = timezone.now()
    return UsageMark, lambda: UsageMark.objects.create(pk=1, counted_until=now), lambda: counting.count_usage(now)


def job(_acme, _model):
    return JobRow, lambda: JobRow.objects.create(name="plans"), lambda: jobs.note_success("plans", 1.0)


WRITERS = [followed_run, application_of_a_run, reported_run, setting, usage_mark, job]


@pytest.mark.django_db
@pytest.mark.parametrize("case", WRITERS)
def test_the_row_of_another_writer_is_taken(other_first, acme, deployment, case):
    model, other, write = case(acme, deployment.model)
    written = other_first(model, other)
    write()
    assert written, "nothing was looked for before it was written"
    assert model.objects.count() == 1
