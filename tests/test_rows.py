"""Rows narrowed, searched, the newest of each kind, and in pages by cursor."""

import pytest

from controlplane.events.models import Event
from controlplane.events.services import record
from controlplane.rows import containing, narrowed, newest_of_each, page_of

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


def test_an_empty_value_does_not_narrow():
    for actor in ("ann", "bob"):
        record("test.happened", actor=actor)
    everything = Event.objects.all()
    assert narrowed(everything, actor="", at__gte=None).count() == 2
    assert narrowed(everything, actor="ann", kind="test.happened").count() == 1
    assert narrowed(everything, pk=0).count() == 0


@pytest.mark.sql
def test_each_word_is_in_one_of_the_fields():
    record("test.happened", actor="ann", reason="More load")
    for text, count in (("", 1), ("LOAD", 1), ("ann load", 1), ("ann bob", 0), ("a " * 2_000, 1)):
        assert containing(Event.objects.all(), text, "actor", "reason").count() == count, text


@pytest.mark.sql
def test_newest_of_each():
    for actor in ("ann", "bob", "ann"):
        record("test.happened", actor=actor)
    newest = newest_of_each(Event.objects.all(), "actor").order_by("pk")
    assert [row.actor for row in newest] == ["bob", "ann"]
    assert newest_of_each(Event.objects.filter(actor="ann"), "kind").get() == Event.objects.order_by("pk").last()
