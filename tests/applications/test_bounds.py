"""A client that sends a new name with each call: bounded rows, one warning, and pages that name it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.applications import services
from controlplane.applications.models import Application, ApplicationRun
from controlplane.events.models import Event
from controlplane.gateway.models import LedgerRow
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db
LIMIT = 5


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(services, "MAX_APPLICATIONS", LIMIT)


def send(tenant, names, **columns):
    now = timezone.now()
    for name in names:
        ledger_row(tenant, arrived_at=now - timedelta(minutes=9), application=name, run="r", **columns)
    services.follow_runs(now)


def test_names_beyond_the_limit_make_no_rows_and_one_warning(acme, globex, viewer, member, client):
    send(acme, ["review"])
    send(acme, [f"id-{number}" for number in range(40)])
    send(acme, [f"other-{number}" for number in range(40)])
    assert Application.objects.filter(tenant=acme).count() == LIMIT
    assert ApplicationRun.objects.count() == LIMIT
    event = Event.objects.get(kind=services.TOO_MANY)
    assert (event.subject, event.severity) == (str(acme), "warning")
    assert "look like ids; put them in the run header, X-Run" in event.reason
    send(globex, ["one", "two"])
    assert Application.objects.filter(tenant=globex).count() == 2
    for user in (viewer, member):
        client.force_login(user)
        assert event.reason in client.get("/applications/").content.decode()


def test_known_ones_are_followed(acme):
    send(acme, [f"id-{number}" for number in range(9)])
    send(acme, ["id-0"], request_id="later")
    assert ApplicationRun.objects.get(application__name="id-0").calls == 2
    assert Application.objects.count() == LIMIT
    assert Event.objects.filter(kind=services.TOO_MANY).count() == 1


def test_a_report_of_one_too_many_is_refused(acme):
    from controlplane.applications import reporting
    from controlplane.gateway.errors import ApiError

    for number in range(LIMIT):
        reporting.open_run(acme, f"id-{number}", "r", None, timezone.now())
    with pytest.raises(ApiError, match="Put ids in `run`"):
        reporting.open_run(acme, "another", "r", None, timezone.now())
    reporting.open_run(acme, "id-0", "another run", None, timezone.now())


def test_an_application_goes_with_its_last_run(acme):
    send(acme, ["gone"])
    LedgerRow.objects.all().delete()
    old = timezone.now() - timedelta(days=services.KEPT_DAYS + 1)
    Application.objects.update(created_at=old)
    ApplicationRun.objects.update(ended_at=old, steps=[])
    services.prune_runs(timezone.now())
    assert not Application.objects.exists()
