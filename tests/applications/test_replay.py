"""Recorded runs replayed with another order, with the other requests of the ledger."""

import re
from datetime import timedelta
from html import unescape
from urllib.parse import parse_qsl, urlsplit

import pytest
from django.utils import timezone

from controlplane.simulation.whatif.asking import advanced_of
from controlplane.simulation.whatif.changes.applying import parsed
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.models import FutureSeed, WhatIf
from controlplane.simulation.whatif.starts.nodes import resolved
from tests.applications.conftest import learned
from tests.console.conftest import ledger_row
from tests.simulation.whatif.rows import run_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def recorded_runs(acme, make_instance, profile):
    make_instance(state="ready")
    for number in range(5):  # other requests of that time
        ledger_row(acme, arrived_at=timezone.now() - timedelta(hours=3, minutes=number))
    return learned(acme, runs=20)


def test_the_page_begins_a_replay_of_its_runs_and_a_what_if_with_its_graph(client, operator, recorded_runs):
    client.force_login(operator)
    page = unescape(client.get(f"/applications/{recorded_runs.pk}/").content.decode())
    (link,) = re.findall(r'href="([^"]*)"[^>]*>Replay with another order…', page)
    now = timezone.now()
    window = {"since": f"{now - timedelta(hours=4):%Y-%m-%dT%H:%M}", "until": f"{now:%Y-%m-%dT%H:%M}"}
    answer = client.post("/what-if/new", dict(parse_qsl(urlsplit(link).query)) | window)
    assert answer.status_code == 302, answer.content.decode()
    row = run_all(WhatIf.objects.get())
    first, second = row.futures.order_by("letter")
    assert (first.name, second.changes[0]["value"]) == ("As now", "hermes")
    for seed in FutureSeed.objects.all():
        of = seed.result["runs"]["review"]
        assert of["runs"] == of["ended"] == 20
        assert seed.result["columns"]["all"]["requests"] > 25
    (link,) = re.findall(r'href="([^"]*)"[^>]*>What-if with this graph…', page)
    (edit,) = advanced_of(dict(parse_qsl(urlsplit(link).query))["advanced"]).edits
    assert edit["application"]["graph"] == f"application:{recorded_runs.pk}"
    assert parsed(resolved([edit], {}))


@pytest.mark.parametrize(("graph", "records"), [("application", 20), ("application:0", None), ("g.json", None)])
def test_a_what_if_has_runs_of_a_recorded_graph(recorded_runs, graph, records):
    named = f"application:{recorded_runs.pk}" if graph == "application" else graph
    edit = {"kind": "application", "application": {"graph": named, "model": "m"}}
    if graph == "application:0":
        with pytest.raises(ChangeError, match="is not known"):
            resolved([edit], {})
        return
    (made,) = resolved([edit], {})
    assert (len(made["application"]["graph"]["records"]) if records else made) == (records or edit)
