"""The models page as people use it: a row opens, a policy is switched in three clicks; in both themes and on a phone."""

import re

import pytest
from playwright.sync_api import expect

from controlplane.events.models import Event
from controlplane.fleet.models import Model
from controlplane.planning import bundles
from tests.e2e.conftest import keep
from tests.e2e.test_accessibility import violations

MODEL = "llama-3.1-8b"
OPEN = f"/models/?open={MODEL}"


def test_a_row_opens_and_closes(furnished, open_page):
    page = open_page(furnished, "/models/")
    row = page.get_by_role("link", name=MODEL, exact=True)
    row.click()
    expect(page).to_have_url(re.compile("open=llama-3.1-8b"))
    expect(page.get_by_role("heading", name="Endpoints")).to_be_visible()
    expect(page.locator("#chart-model .main-svg").first).to_be_visible()
    expect(row).to_have_attribute("aria-expanded", "true")
    expect(row).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(".opened")).to_have_count(0)
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("link", name="llama-3.2-3b", exact=True)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile("open=llama-3.2-3b"))
    expect(page.locator("#chart-model .main-svg").first).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".opened")).to_have_count(0)


@pytest.mark.gate
def test_a_bundle_is_switched_in_three_clicks(furnished, open_page):
    page = open_page(furnished, "/models/")
    page.get_by_role("button", name=f"is the policy of {MODEL}").click()
    dialog = page.locator("dialog[open]")
    assert violations(page) == []
    keep(page, "models-bundle-dark")
    dialog.get_by_role("radio", name=re.compile("^SSJF")).click()
    dialog.get_by_label("Reason, kept with the event").fill("short answers wait behind long ones")
    dialog.get_by_role("button", name="Switch").click()
    expect(page.locator(".messages")).to_contain_text(f"{MODEL} now uses SSJF")
    assert bundles.present(Model.objects.get(name=MODEL)).name == "ssjf"
    expect(page.locator("#bundles")).to_contain_text(MODEL)


def test_a_single_part_is_changed_and_says_first_what_changes(furnished, open_page):
    page = open_page(furnished, OPEN)
    page.get_by_role("button", name="Change parts…").click()
    dialog = page.locator("dialog[open]")
    dialog.get_by_label("Router").select_option("round_robin")
    expect(dialog.locator("[data-changed]")).to_contain_text("Router: Round robin instead of")
    assert violations(page) == []
    keep(page, "models-parts-dark")
    dialog.get_by_label("Reason, kept with the event").fill("to compare with")
    dialog.get_by_role("button", name="Change").click()
    expect(page.locator(".parts")).to_contain_text("Round robin")
    event = Event.objects.latest("pk")
    assert (event.kind, event.after) == ("model.parts_switched", {"routing_policy": "round_robin"})
