"""Events of one move are one row."""

import re
from itertools import pairwise

import pytest
from django.urls import reverse

from controlplane.console.selectors.events import folded
from controlplane.events.models import Event, Severity
from controlplane.events.services import record


def moved(row, *states, severity=Severity.INFO):
    for before, after in pairwise(states):
        record(
            "instance.moved", row, actor="gateway", before={"state": before}, after={"state": after}, severity=severity
        )


def rows():
    return folded(list(Event.objects.order_by("-pk")))


def test_a_start_is_one_row_with_its_reason_and_steps(make_instance):
    row, other = make_instance(), make_instance()
    record("scaling.added", row, actor="floor", reason="use is 92%")
    record("instance.start_requested", row, actor="floor", reason="use is 92%")
    moved(row, "stopped", "provisioning", "loading")
    moved(other, "ready", "draining", "stopped")
    moved(row, "loading", "ready")
    start, stop = rows()
    assert start["title"] == f"{row.name}: added by scaling, now ready"
    assert (start["reason"], start["actor"], len(start["steps"])) == ("use is 92%", "floor", 4)
    assert start["took"] == "0 s"
    assert stop["title"] == f"{other.name}: ready to stopped"
    assert [step["title"] for step in stop["steps"]] == ["Ready to draining", "Draining to stopped"]


def test_a_start_under_way_has_no_time_yet(make_instance):
    moved(make_instance(), "stopped", "provisioning", "loading")
    (start,) = rows()
    assert start["title"].endswith(": stopped to loading")
    assert "took" not in start


def test_successive_moves_are_separate_rows(make_instance):
    moved(make_instance(), "stopped", "provisioning", "loading", "ready", "draining", "stopped")
    assert [row["title"].partition(": ")[2] for row in rows()] == ["ready to stopped", "stopped to ready"]


def test_a_failure_is_seen_though_it_is_the_last_step(make_instance):
    row = make_instance()
    moved(row, "stopped", "provisioning", "loading")
    moved(row, "loading", "failed", severity=Severity.CRITICAL)
    (start,) = rows()
    assert start["severity"] == Severity.CRITICAL


def test_a_later_decision_is_a_separate_row(make_instance):
    row = make_instance()
    record("scaling.added", row, actor="floor", reason="full")
    moved(row, "stopped", "provisioning", "loading", "ready")
    record("scaling.removed", row, actor="floor", reason="empty")
    moved(row, "ready", "draining", "stopped")
    assert [row["reason"] for row in rows()] == ["empty", "full"]


@pytest.mark.django_db
def test_the_page_folds_them(reader, make_instance):
    moved(make_instance(), "stopped", "provisioning", "loading", "ready")
    html = reader.get(reverse("console:events")).content.decode()
    assert html.count("<tr data-severity") == 1
    assert re.search(r"<summary>3 steps</summary>", html)
