"""Stop means stop, as an operator meets it: a held instance, a cordoned node, a model that is retired."""

from playwright.sync_api import expect

from controlplane.fleet.models import Instance, Node, Region
from tests.e2e.conftest import keep


def test_stopped_instances_are_held_and_cordoned_places_are_shown(console, open_page):
    name = "llama-3-2-3b-us-central-1"
    page = open_page(console, f"/instances/{name}/")
    page.get_by_role("button", name="Stop…").click()
    dialog = page.get_by_role("dialog", name=f"Stop {name}?")
    expect(dialog).to_contain_text("Only Start brings it back. It runs")
    expect(dialog).not_to_contain_text("<strong>")
    dialog.get_by_label("Reason").fill("kernel update, do not start")
    dialog.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Held by operator, kernel update, do not start")).to_be_visible()
    row = Instance.objects.get(name=name)
    assert row.held.startswith("operator, kernel update")
    keep(page, "instance-held")

    page = open_page(console, "/nodes/")
    expect(page.locator("main")).to_contain_text(f"{name} is held by operator")
    place = Node.objects.order_by("name").first() or Region.objects.order_by("name").first()
    assert place is not None
    page.get_by_role("button", name=f"Cordon… {place}").click()
    dialog = page.get_by_role("dialog", name=f"Cordon {place}?")
    dialog.get_by_label("Reason").fill("cooling fails")
    dialog.get_by_role("button", name="Cordon").click()
    expect(page.locator("main")).to_contain_text("operator, cooling fails")
    place.refresh_from_db()
    assert "cooling fails" in place.cordoned
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        keep(page, f"nodes-{theme}")
    page.get_by_role("button", name=f"Uncordon… {place}").click()
    dialog = page.get_by_role("dialog", name=f"Uncordon {place}?")
    dialog.get_by_label("Reason").fill("it cools")
    dialog.get_by_role("button", name="Uncordon").click()
    expect(page.locator("main")).not_to_contain_text("operator, cooling fails")
    Instance.objects.filter(pk=row.pk).update(held="", state="ready")
