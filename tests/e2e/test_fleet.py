"""The fleet as operators use it: stop means stop, maintenance of a node, and one act on several instances."""

import re

import pytest
from playwright.sync_api import expect

from controlplane.fleet.models import Instance, Maintenance, Node
from tests.e2e.conftest import keep


def confirm(page, reason, button):
    dialog = page.locator("dialog[open]")
    dialog.get_by_label("Reason").fill(reason)
    dialog.get_by_role("button", name=button, exact=True).click()


@pytest.fixture
def restored(console):
    """The console, whose instances are as they were when the test ends."""
    before = list(Instance.objects.all())
    yield console
    Maintenance.objects.all().delete()
    Node.objects.update(cordoned="")
    Instance.objects.bulk_update(before, ["state", "state_changed_at", "held", "restart"])


def test_a_stopped_instance_says_who_stopped_it(restored, open_page):
    name = "llama-3-2-3b-us-central-1"
    page = open_page(restored, f"/fleet/instances/{name}/")
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name=f"Stop {name}?")
    expect(dialog).to_contain_text("Only Start brings it back. It runs")
    expect(dialog).not_to_contain_text("<strong>")
    confirm(page, "kernel update, do not start", "Stop")
    expect(page.get_by_text("Stopped by operator, kernel update, do not start")).to_be_visible()
    assert Instance.objects.get(name=name).held.startswith("operator, kernel update")
    keep(page, "instance-held")


@pytest.mark.gate
def test_a_node_is_taken_into_maintenance_and_back(restored, open_page):
    node = Instance.objects.filter(state="ready").exclude(node=None).first().node
    page = open_page(restored, "/fleet/")
    page.get_by_role("link", name=f"Details of {node}").click()
    page.get_by_role("button", name="Maintenance…").click()
    confirm(page, "a new driver", "Start maintenance")
    notice = page.locator("#maintenance")
    expect(notice).to_contain_text(f"{node} is in maintenance until")
    node.refresh_from_db()
    assert "a new driver" in node.cordoned
    page.goto("/")
    expect(notice).to_contain_text("a new driver")
    notice.get_by_role("button", name="End…").click()
    confirm(page, "it is in", "End")
    expect(page.locator("main")).to_contain_text("what it stopped starts again")
    node.refresh_from_db()
    assert node.cordoned == ""


@pytest.mark.gate
def test_instances_selected_by_key_and_range_are_drained_at_once(restored, open_page):
    page = open_page(restored, "/fleet/")
    boxes = page.locator("tr:has([data-status=ready]) [data-select]")
    names = [each.removeprefix("Select ") for each in boxes.evaluate_all("all => all.map(one => one.ariaLabel)")]
    boxes.nth(0).focus()
    page.keyboard.press("Space")
    boxes.nth(2).focus()
    page.keyboard.press("Shift+Space")
    chosen = page.locator("[data-select]:checked").evaluate_all("all => all.map(one => one.ariaLabel)")
    expect(page.locator("[data-selected]")).to_have_text(f"{len(chosen)} selected")
    assert {names[0], names[2]} <= {each.removeprefix("Select ") for each in chosen}
    page.get_by_role("button", name="Act on them…").click()
    expect(page.locator("dialog[open]")).to_contain_text(names[2])
    page.locator("dialog[open]").get_by_role("radio", name=re.compile("^Drain")).check()
    keep(page, "bulk-dialog")
    confirm(page, "a new driver", "Carry out")
    expect(page.locator(".messages")).to_contain_text("Drain: ")
    assert Instance.objects.filter(name__in=(names[0], names[2]), state="draining").count() == 2
