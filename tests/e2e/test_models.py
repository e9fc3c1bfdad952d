"""Models as people use them: demand and forecast on one chart, a policy is switched in three clicks."""

import re

import pytest
from playwright.sync_api import expect

from controlplane.events.models import Event
from controlplane.fleet.models import Model
from controlplane.planning import bundles
from tests.e2e.conftest import keep
from tests.e2e.test_accessibility import violations

MODEL = "llama-3.1-8b"
OPEN = f"/models/{MODEL}/"


@pytest.mark.gate
def test_the_forecast_is_drawn_with_its_bands_and_redrawn(furnished, open_page):
    page = open_page(furnished, "/models/")
    page.get_by_role("link", name=MODEL, exact=True).click()
    expect(page.locator("#chart-demand .main-svg").first).to_be_visible()
    traces = page.evaluate("document.querySelector('#chart-demand [data-plot]').data.map((trace) => trace.name)")
    assert traces[-2:] == ["capacity", "capacity as planned"]
    assert "forecast" in traces
    assert traces.count("80%") == traces.count("95%") == 2
    page.get_by_role("combobox", name="Region").select_option("us-west")
    expect(page).to_have_url(re.compile("region=us-west"))
    expect(page.locator("#chart-demand .caption")).to_have_text(re.compile("US West"))


@pytest.mark.gate
def test_a_bundle_is_switched_in_three_clicks(furnished, open_page):
    page = open_page(furnished, OPEN)
    page.get_by_role("button", name="Switch the policy…").click()
    dialog = page.locator("dialog[open]")
    assert violations(page) == []
    keep(page, "models-bundle-dark")
    dialog.get_by_role("radio", name=re.compile("^SSJF")).click()
    dialog.get_by_label("Reason, kept with the event").fill("short answers wait behind long ones")
    dialog.get_by_role("button", name="Switch").click()
    expect(page.locator(".messages")).to_contain_text(f"{MODEL} now uses SSJF")
    assert bundles.present(Model.objects.get(name=MODEL)).name == "ssjf"
    expect(page.locator("#policy")).to_contain_text("SSJF")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_the_dialogs(furnished, open_page, theme):
    page = open_page(furnished, OPEN, user="admin", theme=theme)
    for word in ("Bounds", "Change", "Fallback", "Share a name", "Shard"):
        page.get_by_role("button", name=re.compile(f"^{word}…")).first.click()
        expect(page.locator("dialog[open]")).to_be_visible()
        assert violations(page) == [], word
        page.keyboard.press("Escape")
    page.goto("/models/")
    page.get_by_role("button", name="Train now…").click()
    assert violations(page) == []


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
    expect(page.locator("#policy")).to_contain_text("Round robin")
    event = Event.objects.latest("pk")
    assert (event.kind, event.after) == ("model.parts_switched", {"routing_policy": "round_robin"})
