"""Drafts of the what-if form: kept with their errors, reopened, run and deleted."""

import pytest
from django.urls import reverse

from controlplane.console.pages.what_if import building
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
NEW = "/what-if/new"
FORM = {"seeds": "2", "horizon": "600", "chosen": "yes", "preset": "qlm", "gpus:east:g": "9", "title": "Tomorrow"}


@pytest.fixture(autouse=True)
def begun(monkeypatch):
    """Every what-if begins with the small fleet."""
    monkeypatch.setattr(building, "begun", lambda begin, horizon_s: Start.model_validate(rows.start()))


@pytest.fixture
def kept(client, operator):
    """Return (its row, the address that opens it)."""
    client.force_login(operator)
    address = client.post(NEW, FORM | {"keep": "1"})["Location"]
    return WhatIf.objects.get(), address


def test_a_form_is_kept_and_opened_again(client, kept):
    row, address = kept
    assert (row.state, row.title, row.start, row.seeds) == (WhatIfState.DRAFT, "Tomorrow", {}, 2)
    assert [future.name for future in row.futures.all()] == ["As now", "QLM", "Other fleet"]
    assert address.endswith(f"&draft={row.pk}")
    text = client.get(address).content.decode()
    assert f'<input type="hidden" name="draft" value="{row.pk}">' in text
    assert "This is the draft" in text
    assert client.get(f"/what-if/{row.pk}/")["Location"] == address
    listed = client.get("/what-if/").content.decode()
    assert "Draft" in listed
    assert "Open<" in listed


def test_kept_again_it_is_the_same_draft_and_may_be_wrong(client, kept):
    row, _ = kept
    client.post(NEW, FORM | {"keep": "1", "draft": row.pk, "title": "", "seeds": "0"})
    row.refresh_from_db()
    assert WhatIf.objects.count() == 1
    assert "seeds=0" in row.asked
    assert row.title == "What if … QLM, Other fleet"


def test_run_it_is_a_draft_no_more(client, kept):
    row, _ = kept
    answer = client.post(NEW, FORM | {"draft": row.pk})
    assert answer["Location"] == reverse("console:what-if", args=[row.pk])
    row.refresh_from_db()
    assert (WhatIf.objects.count(), row.state, row.start["kind"]) == (1, WhatIfState.QUEUED, "synthetic")
    client.post(NEW, FORM | {"draft": row.pk})  # a what-if that has run is not changed
    assert WhatIf.objects.count() == 2


def test_refused_it_stays(client, kept, monkeypatch):
    row, _ = kept
    monkeypatch.setattr(services, "MAX_OPEN", 0)
    assert "what-ifs wait or run" in client.post(NEW, FORM | {"draft": row.pk}).content.decode()
    row.refresh_from_db()
    assert row.state == WhatIfState.DRAFT


def test_it_is_deleted_by_an_operator(client, kept, viewer, operator):
    row, address = kept
    client.force_login(viewer)
    assert 'name="keep"' not in client.get(address).content.decode()
    assert client.post(NEW, FORM | {"keep": "1"}).status_code == 422
    assert client.post(f"/what-if/{row.pk}/delete/").status_code == 403
    client.force_login(operator)
    assert client.post(f"/what-if/{row.pk}/delete/")["Location"] == reverse("console:what-ifs")
    assert not WhatIf.objects.exists()


def test_they_are_not_endless(client, kept, monkeypatch):
    monkeypatch.setattr(services, "MOST_DRAFTS", 1)
    text = client.post(NEW, FORM | {"keep": "1"}).content.decode()
    assert "1 drafts are kept" in text
    assert WhatIf.objects.count() == 1


def test_a_draft_of_the_rest_api_is_run_on_its_page(client, operator):
    client.force_login(operator)
    row = rows.draft(operator, {"name": "Reactive", "changes": []})
    text = client.get(f"/what-if/{row.pk}/").content.decode()
    assert reverse("console:what-if-act", args=[row.pk, "run"]) in text
    client.post(f"/what-if/{row.pk}/run/")
    row.refresh_from_db()
    assert row.state == WhatIfState.QUEUED


def test_gpus_that_are_as_they_are_stay_out_of_the_address(acting):
    scenario = rows.start()["scenario"]
    (_, (was,)), _ = building.cells_of({}, scenario)[2]
    acting.post(NEW, FORM | {"keep": "1", was["name"]: was["value"]})
    asked = WhatIf.objects.get().asked
    assert "price" not in asked
    assert "gpus" in asked
