"""Pages of rows by cursor."""

import pytest

from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.paging import page_of

pytestmark = pytest.mark.django_db


def test_pages():
    for number in range(5):
        record("test.happened", actor=f"a{number}")
    page = page_of(Event.objects.all(), None, 2)
    assert [event.actor for event in page.rows] == ["a4", "a3"]
    page = page_of(Event.objects.all(), page.next_cursor, 3)
    assert [event.actor for event in page.rows] == ["a2", "a1", "a0"]
    assert page.next_cursor is None
    assert page_of(Event.objects.none()).rows == []


def test_page_size_has_bounds():
    record("test.happened", actor="a")
    assert len(page_of(Event.objects.all(), None, 0).rows) == 1
    assert len(page_of(Event.objects.all(), None, 10**9).rows) == 1
