"""Lengths as people use them: versions of the length model, and why a request was predicted so long; in both themes."""

import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.gateway.models import LedgerRow
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion
from tests.console import length_rows
from tests.console.test_placements import DELAY
from tests.e2e.conftest import DESKTOP, PHONE, keep
from tests.e2e.test_accessibility import settle, violations


@pytest.fixture(scope="module")
def furnished(console):
    """The console with metrics, samples and versions, removed afterwards."""
    length_rows.furnish(timezone.now(), ("acme",))
    for number, kind in ((9, "trees"), (10, "trees")):
        LengthVersion.objects.create(number=number, kind=kind, measures={"mae": 60.0}, note="for a test to decide on")
    yield console
    for rows in (LengthMinute, LengthSample, LengthVersion):
        rows.objects.all().delete()


@pytest.fixture
def explained(console):
    """A request whose trace explains its length, removed afterwards."""
    row = LedgerRow.objects.exclude(trace=[]).first()
    before = row.trace
    row.trace = [DELAY]
    row.save()
    yield row
    row.trace = before
    row.save()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(furnished, explained, open_page, theme):
    page = open_page(furnished, "/events/", theme=theme)
    paths = {"length-models": "/models/", "why": f"/requests/{explained.pk}/"}
    violations_of = {}
    for name, path in paths.items():
        page.set_viewport_size(DESKTOP)
        page.goto(path)
        settle(page)
        violations_of[name] = violations(page)
        keep(page, f"{name}-{theme}-1440")
        page.set_viewport_size(PHONE)
        page.wait_for_timeout(300)
        violations_of[name] += violations(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], name
        keep(page, f"{name}-{theme}-390")
    assert violations_of == {name: [] for name in paths}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_the_dialogs(furnished, open_page, theme):
    page = open_page(furnished, "/models/", theme=theme)
    for word in ("Promote", "Roll back", "Train now"):
        page.get_by_role("button", name=re.compile(f"^{word}…")).first.click()
        expect(page.locator("dialog[open]")).to_be_visible()
        assert violations(page) == []
        page.keyboard.press("Escape")
