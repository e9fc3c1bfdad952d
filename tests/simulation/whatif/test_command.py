"""`manage.py whatif` on what-ifs that exist: followed, left to workers, cancelled and resumed."""

import io
import json

import pytest
from django.core.management import CommandError, call_command

from controlplane.events.models import Event
from controlplane.simulation.whatif import selectors, services, working
from controlplane.simulation.whatif.management.commands import whatif
from controlplane.simulation.whatif.models import FutureSeed, WhatIfState
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
QLM = {"name": "QLM", "changes": [{"kind": "policy", "part": "bundle", "value": "qlm"}]}


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    monkeypatch.setattr(working, "send_task", lambda task, **_: True)


@pytest.fixture
def asked(operator):
    return services.submit(rows.draft(operator, QLM, horizon_s=600.0), operator)


def said(*args):
    out = io.StringIO()
    call_command("whatif", *args, stdout=out)
    return out.getvalue()


def state(row):
    row.refresh_from_db()
    return row.state


def test_it_is_cancelled_and_resumed_here(asked):
    working.work()
    text = said("--cancel", str(asked.pk))
    assert text == (
        f"What-if {asked.pk} is cancelled; 1 of 4 runs are kept. `manage.py whatif --resume {asked.pk}` runs the rest.\n"
    )
    assert (state(asked), asked.ended_by) == (WhatIfState.CANCELLED, "command line")
    with pytest.raises(CommandError, match="It is cancelled"):
        said("--cancel", str(asked.pk))
    made = json.loads(said("--resume", str(asked.pk), "--here", "--json"))
    assert made["state"] == "done"
    assert [each["seeds_done"] for each in made["futures"]] == [2, 2]
    with pytest.raises(CommandError, match="Nothing is missing"):
        said("--resume", str(asked.pk))
    actors = dict(Event.objects.filter(subject_type="whatif").values_list("kind", "actor"))
    assert actors["what_if.cancelled"] == actors["what_if.resumed"] == "command line"


@pytest.mark.parametrize(("every_s", "looks"), [(0.0, 3), (3600.0, 0)])
def test_a_waiting_process_checks_runs_periodically(asked, monkeypatch, every_s, looks):
    """Not at every poll of its progress: each time all waiting work is sent for again."""
    states, looked = ["running"] * 3 + ["done"], []
    progress = selectors.progress
    monkeypatch.setattr(selectors, "progress", lambda pk: progress(pk) | {"state": states.pop(0)})
    monkeypatch.setattr(working, "supervise", looked.append)
    monkeypatch.setattr(whatif, "LOOK_S", 0.0)
    monkeypatch.setattr(whatif, "LOOK_AFTER_S", every_s)
    said(str(asked.pk), "--json")
    assert (len(looked), states) == (looks, [])


def test_one_future_is_cancelled_alone(asked):
    assert f"Future B of what-if {asked.pk} is cancelled" in said("--cancel", str(asked.pk), "--future", "B")
    assert state(asked) == WhatIfState.QUEUED
    assert set(FutureSeed.objects.filter(future__letter="B").values_list("state", flat=True)) == {"cancelled"}
    seen = json.loads(said("--cancel", str(asked.pk), "--json"))
    assert (seen["id"], seen["state"]) == (asked.pk, "cancelled")


def test_one_that_is_not_there_is_refused():
    for option in ("--cancel", "--resume"):
        with pytest.raises(CommandError, match="There is no what-if 9"):
            said(option, "9")


def test_ctrl_c_leaves_it_to_workers_and_says_how_to_cancel(asked, monkeypatch, capsys):
    def pressed(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(whatif.time, "sleep", pressed)
    with pytest.raises(SystemExit) as left:
        said(str(asked.pk))
    assert left.value.code == 130
    text = capsys.readouterr().err
    assert f"What-if {asked.pk} continues where workers run." in text
    assert f"manage.py whatif --cancel {asked.pk}" in text
    assert state(asked) == WhatIfState.QUEUED
