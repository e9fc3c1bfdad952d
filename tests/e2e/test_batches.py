"""Pages of batches, held work, the spot pool and applications in Chromium: every state, both themes, desktop and phone."""

import re

import pytest
from playwright.sync_api import expect

from controlplane.applications.models import ApplicationRun
from controlplane.batches.models import Batch, BatchStatus
from controlplane.events.models import Event
from tests.e2e.test_accessibility import THEMES, look, violations

PAGES = {
    "batches": "/batches/",
    "batch": "/batches/{batch}/",
    "batch-failed": "/batches/{failed}/",
    "applications": "/applications/",
    "application": "/applications/{application}/",
    "application-run": "/applications/runs/{run}/",
}


def address(name: str) -> str:
    running = Batch.objects.filter(status=BatchStatus.IN_PROGRESS).earliest("pk")
    failed = Batch.objects.get(status=BatchStatus.FAILED)
    run = ApplicationRun.objects.order_by("calls").last()
    assert run is not None
    return PAGES[name].format(
        batch=running.public_id, failed=failed.public_id, application=run.application_id, run=run.pk
    )


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(batch_console, open_page, name, theme):
    page = open_page(batch_console, address(name), theme=theme)
    look(page, f"{name}-{theme}")


@pytest.mark.gate
def test_a_batch_is_canceled_and_the_row_says_so(batch_console, open_page):
    page = open_page(batch_console, "/")
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Batches").click()
    batch = Batch.objects.get(status=BatchStatus.IN_PROGRESS, total=50_000)
    row = page.locator("#batches-panel tr").filter(has_text=batch.short_id)
    row.get_by_role("button", name=re.compile("^Cancel")).click()
    dialog = page.locator("dialog[open]")
    expect(dialog).to_contain_text("18,600 of 50,000 lines will get no answer")
    assert violations(page) == []
    dialog.get_by_label("Reason, kept with the event").fill("wrong prompt")
    dialog.get_by_role("button", name=re.compile("^Cancel")).last.click()
    expect(page.locator(".messages")).to_contain_text("is being canceled")
    expect(page.locator("main")).to_contain_text("Canceling")
    assert Event.objects.get(kind="batch.canceled").reason == "wrong prompt"
