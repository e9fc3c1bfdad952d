"""What the pages say is so, and stays where it is: SLO by class, demand and capacity, and what moves under the eye."""

import re
import time

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.alerts.models import Alert, AlertRule
from controlplane.events.services import record
from controlplane.fleet.models import Instance
from tests.e2e.conftest import keep
from tests.e2e.test_console import expect_drawn, expect_live
from tests.e2e.test_deploy import fill

SHIFTS = """() => {
  window.shifts = [];
  new PerformanceObserver((list) => {
    for (const { startTime, value, hadRecentInput, sources } of list.getEntries()) {
      const moved = sources.map(({ node }) => (node?.outerHTML ?? node?.parentElement?.outerHTML)?.slice(0, 100));
      if (!hadRecentInput) window.shifts.push([startTime, value, moved]);
    }
  }).observe({ type: "layout-shift", buffered: true });
}"""
WATCHED_MS = 60_000


@pytest.mark.nightly
@pytest.mark.parametrize("path", ["/", "/fleet/", "/queues/"])
def test_a_page_stays_under_the_eye_for_a_minute(furnished, open_page, path):
    """While numbers change twice a second, events and alerts come and go, and an instance stops answering."""
    page = open_page(furnished, path)
    page.evaluate(SHIFTS)
    expect_live(page)
    if path == "/":
        expect_drawn(page, "ttft", "demand", "kv")
    page.wait_for_timeout(1_000)
    settled_ms = page.evaluate("performance.now()")
    row, rule = Instance.objects.filter(state="ready").first(), AlertRule.objects.filter(condition="instance").first()
    said = next(said for said in furnished.speaker.feed.rows if said["id"] == row.pk)
    for at in range(6):
        now, lost = timezone.now(), at % 2 == 0
        said["reachable"] = not lost
        record("instance.changed", row, actor="a test", reason="a reason that is longer than its line " * (at + 1))
        if lost:
            alerts = [
                Alert.objects.create(
                    rule=rule, subject=f"{row.name}-{number}", title=f"{row.name} does not answer", severity="critical",
                    detail="3 heartbeats missed", since=now, opened_at=now, seen_at=now,
                )
                for number in range(3 + at)
            ]  # fmt: skip
        else:
            for alert in alerts:
                alert.delete()
        page.wait_for_timeout(WATCHED_MS / 6)
    said["reachable"] = True
    shifts = [one for one in page.evaluate("window.shifts") if one[0] > settled_ms]
    # Chromium calls 0.1 good; a text that grew by a part of a pixel was 0.00002.
    assert sum(score for _, score, _ in shifts) < 1e-3, shifts


def test_rows_do_not_move_under_the_pointer(console, open_page):
    page = open_page(console, "/")
    expect_live(page)
    panel = page.locator("#instances-panel")
    row = panel.locator("tbody tr").nth(3)
    row.hover()
    element, said = panel.element_handle(), console.speaker.feed.rows[0]
    said["reachable"] = False  # the page draws its regions again
    page.wait_for_timeout(4_000)
    assert element.evaluate("element => element.isConnected")
    page.mouse.move(5, 5)
    page.wait_for_function("element => !element.isConnected", arg=element)
    said["reachable"] = True


def test_a_socket_that_is_silent_is_left_for_another(console, open_page):
    """A half-open connection: nothing arrives and nothing closes. Numbers are polled until another socket is open."""
    page = open_page(console, "/events/", user="operator")
    held: list = []
    opened: list = []

    def pass_on(route) -> None:
        server = route.connect_to_server()
        opened.append(route)
        frozen = len(opened) == 1
        server.on_message(
            lambda message: held.append(message) if frozen and len(opened) and held_now() else route.send(message)
        )

    began = time.monotonic()

    def held_now() -> bool:
        return time.monotonic() - began > 3

    page.route_web_socket(re.compile("/ws/live/"), pass_on)
    page.goto("/")
    expect_live(page)
    began = time.monotonic() - 10  # from now on the first socket is frozen
    expect(page.locator("[data-live]")).to_have_attribute(
        "data-word", re.compile("delayed|disconnected"), timeout=20_000
    )
    expect_live(page, timeout=30_000)
    for _ in range(20):
        if len(opened) >= 2:
            break
        page.wait_for_timeout(1_000)
    assert len(opened) >= 2
    assert held
    expect_live(page)


@pytest.mark.parametrize(("width", "height"), [(900, 900), (390, 844)])
def test_the_whole_navigation_is_behind_a_button_in_a_narrow_window(console, open_page, width, height):
    page = open_page(console, "/", viewport={"width": width, "height": height})
    links = page.get_by_role("navigation", name="Main").get_by_role("link")
    expect(links.first).to_be_hidden()
    page.get_by_role("button", name="Menu").click()
    assert links.count() >= 12
    for at in range(links.count()):
        box = links.nth(at).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    keep(page, f"menu-{width}")


@pytest.mark.gate
def test_a_field_that_is_wrong_is_named_and_not_hidden(console, open_page, complaints):
    complaints.allowed = ("status of 422",)
    page = open_page(console, "/models/deploy/")
    fill(page)
    page.get_by_label("Parameters (billions)", exact=True).fill("400")
    expect(page.locator("#estimate")).to_contain_text("No: use more GPUs")
    page.get_by_role("button", name="Deploy").click()
    expect(page.locator("#id_tensor_parallel_error")).to_contain_text("Use more GPUs")
    summary = page.locator(".form-error")
    expect(summary).to_contain_text("Nothing was deployed. To correct: GPUs per instance")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    summary.get_by_role("link").first.click()
    bar = page.locator(".bar-top").bounding_box()
    field = page.locator("#id_tensor_parallel").bounding_box()
    assert field["y"] >= bar["y"] + bar["height"]


def test_a_refused_page_leaves_no_traceback(console, open_page, complaints):
    complaints.allowed = ("status of 403",)
    log = console.web.log
    before = log.stat().st_size
    page = open_page(console, "/fleet/", user="tenant")
    expect(page.get_by_role("heading", level=1)).to_have_text("Not allowed")
    said = log.read_text()[before:]
    assert "Forbidden (Permission denied): /fleet/" in said
    assert "Traceback" not in said
