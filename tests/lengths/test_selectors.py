"""Measures are sums over minutes: checked against requests that are counted one by one."""

from datetime import timedelta

import pytest
from django.db.models import Sum
from django.utils import timezone

from controlplane.lengths import selectors
from controlplane.lengths.models import LengthMinute, LengthVersion, Measures, VersionState
from controlplane.lengths.selectors import scope_of

pytestmark = pytest.mark.django_db

# (minutes ago, model, tenant, predictor, predicted, real)
REQUESTS = (
    (1, "a", "acme", "trees 1", 100, 90),
    (1, "a", "acme", "trees 1", 100, 160),
    (1, "a", "acme", "shadow trees 2", 120, 90),
    (1, "a", "globex", "cache", 40, 40),
    (3, "b", "acme", "prior", 300, 20),
    (3, "b", "acme", "shadow trees 2", 30, 20),
    (90, "a", "acme", "trees 1", 10, 500),
)


@pytest.fixture
def now():
    return timezone.now()


@pytest.fixture
def counted(now):
    """REQUESTS as rows, by minute; the 0.9 quantile of each is twice its prediction."""
    for ago, model, tenant, predictor, predicted, real in REQUESTS:
        row, _ = LengthMinute.objects.get_or_create(
            minute=(now - timedelta(minutes=ago)).replace(second=0, microsecond=0),
            model=model,
            tenant=tenant,
            predictor=predictor,
        )
        error = abs(predicted - real)
        row.requests += 1
        row.predicted_tokens += predicted
        row.output_tokens += real
        row.absolute_error_tokens += error
        row.within_25 += error <= 25
        row.within_50 += error <= 50
        row.within_100 += error <= 100
        row.below_median += real <= predicted
        row.below_upper += real <= 2 * predicted
        row.save()


def whole(scope: selectors.Scope) -> Measures:
    """Over all requests of *scope*, in one sum."""
    return Measures.of(selectors.minutes(scope).aggregate(**{name: Sum(name) for name in Measures.NAMES}))


@pytest.mark.sql
def test_measures_of_an_hour(counted, now):
    measures = whole(scope_of(now, 1))
    errors = [10, 60, 0, 280]
    assert measures.requests == 4
    assert measures.mae == sum(errors) / 4
    assert measures.bias == (10 - 60 + 0 + 280) / 4
    assert measures.mean_output == (90 + 160 + 40 + 20) / 4
    assert (measures.acc_25, measures.acc_50, measures.acc_100) == (0.5, 0.5, 0.75)
    assert (measures.coverage_median, measures.coverage_upper) == (0.75, 1.0)


def test_without_requests_nothing_is_known(now):
    measures = whole(scope_of(now, 1))
    assert measures == Measures()
    for name in ("mae", "bias", "acc_25", "coverage_upper"):
        assert getattr(measures, name) is None
    assert selectors.active_version() is None
    assert selectors.shadow_version() is None


@pytest.mark.parametrize(
    ("scope", "requests"),
    [
        ({"hours": 24}, 5),
        ({"hours": 1, "model": "b"}, 1),
        ({"hours": 1, "tenants": ["globex"]}, 1),
        ({"hours": 1, "tenants": []}, 0),
        ({"hours": 24, "model": "a", "tenants": ["acme", "globex"]}, 4),
        ({"hours": 0.04}, 3),
    ],
)
def test_a_scope_narrows(counted, now, scope, requests):
    assert whole(scope_of(now, **scope)).requests == requests


def test_groups_add_up_to_the_whole_and_shadows_are_separate(counted, now):
    scope = scope_of(now, 24)
    expected = whole(scope)
    assert selectors.total(selectors.by(scope, "model", "tenant").values()) == expected
    assert selectors.by(scope, "model", "tenant")["a", "globex"].requests == 1
    by_predictor = selectors.by(scope, "predictor", shadows=True)
    assert by_predictor.pop("shadow trees 2").requests == 2
    assert selectors.total(by_predictor.values()) == expected


def test_versions_and_the_shadow_against_the_active_one(counted, now):
    for number, state in enumerate((VersionState.ACTIVE, VersionState.SHADOW, VersionState.REJECTED), 1):
        LengthVersion.objects.create(number=number, kind="trees", state=state)
    assert [version.number for version in selectors.versions()] == [3, 2, 1]
    assert str(selectors.active_version()) == "trees 1"
    assert str(selectors.shadow_version()) == "trees 2"
    active, shadow = selectors.compared("trees 1", "shadow trees 2", scope_of(now, 24))
    assert (active.requests, shadow.requests) == (2, 1)  # of the one minute in which both predicted
    assert selectors.gain(active, shadow) == pytest.approx(1 - 30 / 35)
    assert selectors.compared("trees 9", "shadow trees 2", scope_of(now, 24)) is None
