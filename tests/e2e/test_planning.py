"""Scaling as people use it: by keyboard, live, with and without rows, in both themes, without a script."""

import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.fleet.models import Model
from controlplane.planning.models import PlanStatus, ScalingPolicy
from tests.console import planning_rows
from tests.e2e.conftest import keep
from tests.e2e.test_accessibility import violations


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_in_the_dialogs(furnished, open_page, theme):
    page = open_page(furnished, "/scaling/", theme=theme)
    for word in ("Approve", "Reject", "Change the autoscaler"):
        page.get_by_role("button", name=re.compile(f"^{word}…")).first.click()
        expect(page.locator("dialog[open]")).to_be_visible()
        assert violations(page) == []
        keep(page, f"dialog-{word.split()[0].lower()}-{theme}")
        page.keyboard.press("Escape")


@pytest.mark.gate
def test_changing_a_policy(furnished, open_page):
    name = "llama-3.2-3b"
    page = open_page(furnished, f"/scaling/?open={name}")
    row = page.locator("tr.chosen")
    expect(row.locator(".of-plan")).to_contain_text("Safety autoscaler alone")
    page.get_by_role("button", name="Change the autoscaler…").click()
    dialog = page.get_by_role("dialog", name=f"How {name} is scaled")
    dialog.get_by_role("combobox", name="Autoscaler").select_option("preserve")
    dialog.get_by_role("radio", name=re.compile("^Auto")).check()
    dialog.get_by_role("button", name="Set the autoscaler").click()  # without a reason the browser asks for one
    expect(dialog).to_be_visible()
    dialog.get_by_label("Reason").fill("a week in shadow was right")
    dialog.get_by_role("button", name="Set the autoscaler").click()
    expect(page.get_by_role("status").filter(has_text=f"{name} is scaled by PreServe, mode auto")).to_be_visible()
    expect(row.locator(".of-plan")).to_contain_text("PreServe, auto")
    policy = ScalingPolicy.objects.get(model=Model.objects.get(name=name))
    assert (policy.strategy, policy.mode) == ("preserve", "auto")
    policy.delete()


def test_new_rows_appear_and_the_focus_stays(furnished, open_page):
    page = open_page(furnished, "/scaling/")
    expect(page.locator("[data-live]")).to_have_attribute("data-word", "live", timeout=15_000)
    button = page.get_by_role("button", name=re.compile("^Approve…"))
    button.focus()
    before = page.locator("#history tbody tr th").first.text_content()
    made = planning_rows.plan(Model.objects.get(name="llama-3.2-3b"), timezone.now(), PlanStatus.SHADOW, (0,))
    expect(page.locator("#history tbody tr th").first).not_to_have_text(before, timeout=30_000)
    expect(button).to_be_focused()
    made.delete()


@pytest.mark.gate
def test_dragging_over_the_calendar_opens_the_schedule_for_that_time(furnished, open_page):
    page = open_page(furnished, "/scaling/calendar/", user="admin")
    plot = page.locator("#chart-calendar [data-plot]")
    expect(plot.locator(".main-svg").first).to_be_visible()
    names = plot.evaluate("(plot) => plot.data.map((trace) => trace.name)")
    assert {"Scheduled minimums", "Plans", "Maintenance", "forecast"} <= set(names)
    drag = plot.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(drag["x"] + 0.7 * drag["width"], drag["y"] + 40)
    page.mouse.down()
    page.mouse.move(drag["x"] + 0.72 * drag["width"], drag["y"] + 60, steps=8)
    page.mouse.up()
    dialog = page.get_by_role("dialog", name="Scheduled minimum")
    expect(dialog).to_be_visible()
    assert re.fullmatch(r"\d\d:(00|15|30|45)", dialog.get_by_label("From", exact=True).input_value())
    assert dialog.get_by_role("checkbox", checked=True).count() in (1, 2)
    assert violations(page) == []
