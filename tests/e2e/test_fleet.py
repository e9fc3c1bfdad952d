"""The fleet as operators use it: stop means stop, and one act on several instances."""

import pytest
from playwright.sync_api import expect

from controlplane.fleet.models import Instance
from tests.e2e.conftest import keep
from tests.e2e.test_accessibility import violations


def test_a_stopped_instance_says_who_stopped_it(restored, open_page):
    name = "llama-3-2-3b-us-central-1"
    page = open_page(restored, f"/fleet/instances/{name}/")
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name=f"Stop {name}?")
    expect(dialog).to_contain_text("Only Start brings it back. It runs")
    expect(dialog).not_to_contain_text("<strong>")
    dialog.get_by_label("Reason").fill("kernel update, do not start")
    dialog.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_text("Stopped by operator, kernel update, do not start")).to_be_visible()
    assert Instance.objects.get(name=name).held.startswith("operator, kernel update")
    keep(page, "instance-held")


@pytest.mark.gate
def test_instances_selected_by_key_and_range_are_drained_at_once(restored, open_page):
    page = open_page(restored, "/fleet/")
    boxes = page.locator("tr[data-row]:has([data-status=ready]) [data-select]")
    names = [each.removeprefix("Select ") for each in boxes.evaluate_all("all => all.map(one => one.ariaLabel)")]
    boxes.nth(0).focus()
    page.keyboard.press("Space")
    boxes.nth(2).focus()
    page.keyboard.press("Shift+Space")
    chosen = page.locator("[data-select]:checked").evaluate_all("all => all.map(one => one.ariaLabel)")
    expect(page.locator("[data-selected]")).to_have_text(f"{len(chosen)} selected")
    assert {names[0], names[2]} <= {each.removeprefix("Select ") for each in chosen}
    bar = page.get_by_role("form", name="Selected instances and nodes")
    expect(bar).to_contain_text(names[2])
    bar.get_by_label("What").select_option("drain")
    expect(bar).to_contain_text("It finishes what it runs")
    bar.get_by_label("Reason").fill("a new driver")
    assert violations(page) == []
    keep(page, "bulk")
    bar.get_by_role("button", name="Carry out").click()
    expect(page.locator(".messages")).to_contain_text("Drain: ")
    assert Instance.objects.filter(name__in=(names[0], names[2]), state="draining").count() == 2
