"""What lacks the runs or the prefixes that a policy goes by is not ranked under it, and pages and REST say why."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.gateway.models import LedgerRow
from controlplane.simulation.whatif import selectors, services, working
from controlplane.simulation.whatif.models import FutureSeed
from controlplane.simulation.whatif.results import NO_PREFIXES, NO_RUNS
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from scheduling.simulation.workload.prefix_groups import as_text
from tests.console.conftest import make_request  # noqa: F401 (a fixture)
from tests.simulation.whatif.rows import run_all

pytestmark = pytest.mark.django_db
FUTURES = ("fcfs-jsq", "hermes", "pilothouse")


@pytest.fixture
def ask(monkeypatch, operator):
    monkeypatch.setattr(working, "send_task", lambda *_, **__: True)

    def submitted(**values):
        now = timezone.now()
        start = start_of(Begin(kind="ledger", since=now - timedelta(minutes=5), until=now), 300.0)
        values |= {"title": "Orders", "start": start.model_dump(mode="json"), "horizon_s": 300.0, "seeds": 1}
        return run_all(services.ask(values, [services.future_of("", name, ()) for name in FUTURES], operator))

    return submitted


@pytest.fixture
def ledger(make_instance, make_request):  # noqa: F811
    """Write twelve runs of three calls, of which two are made at once."""
    make_instance()
    for number in range(36):
        run, step = divmod(number, 3)
        ago_s = 200 - 10 * run - (2.0 if step else 0.0)
        make_request(
            arrived_at=timezone.now() - timedelta(seconds=ago_s), model="llama-3.1-8b", region="us-east",
            prompt_tokens=200, output_tokens=60, e2e_ms=1500.0, unit="plan" if step else "work",
            request_id=f"r{number}", application="agent", run=f"{run}", prefix_groups=as_text([7, 100 + number], 64),
        )  # fmt: skip


def verdicts(row):
    return {each["name"]: (each["verdict"], each["unranked"]) for each in selectors.comparison(row)["futures"][1:]}


def test_recorded_runs_and_prefixes_are_simulated_and_ranked(ask, ledger):
    made = verdicts(ask())
    assert not any(why or verdict == "Not ranked" for verdict, why in made.values())
    for result in FutureSeed.objects.values_list("result", flat=True):
        assert (result["runs"]["agent"]["runs"], result["runs"]["agent"]["ended"]) == (12, 12)


@pytest.mark.parametrize(
    ("lacks", "hermes", "pilothouse"),
    [
        ({"application": ""}, NO_RUNS, ""),
        ({"prefix_groups": None}, NO_PREFIXES, NO_PREFIXES),
        ({"prefix_groups": ""}, NO_PREFIXES, NO_PREFIXES),
    ],
)
def test_what_they_lack_is_said_in_one_sentence(ask, ledger, client, operator, lacks, hermes, pilothouse):
    LedgerRow.objects.update(**lacks)
    row = ask(nightly=True)
    made = verdicts(row)
    assert [why for _, why in made.values()] == ["", hermes, pilothouse]
    assert all((verdict == "Not ranked") == bool(why) for verdict, why in made.values())
    client.force_login(operator)
    page = client.get(f"/what-if/{row.pk}/?future=C").content.decode()
    assert page.count(hermes) == 1 + bool(pilothouse == hermes) + 1, "in the table, and beside the chosen future"
    listed = client.get(f"/api/what-ifs/{row.pk}/comparison").json()["futures"]
    assert [each["unranked"] for each in listed] == ["", "", hermes, pilothouse]
