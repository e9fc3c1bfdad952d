"""axe finds nothing against WCAG 2.2 A and AA on any page, in either theme, with data, without, and disconnected."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from controlplane.events.models import Event
from controlplane.gateway.models import LedgerRow
from controlplane.planning.models import PlanStatus, ScalingPlan
from tests.e2e import seed
from tests.e2e.conftest import PHONE, keep

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], "resultTypes": ["violations"]}
THEMES = ("light", "dark")
PAGES = {
    "overview": "/",
    "overview-table": "/?table=ttft&demand=prompt",
    "fleet": "/fleet/",
    "fleet-sorted": "/fleet/?sort=-kv_ratio",
    "node": f"/fleet/nodes/{seed.NODE}/",
    "instance": f"/fleet/instances/{seed.DRAINED}/",
    "instance-failed": f"/fleet/instances/{seed.FAILED}/",
    "requests": "/requests/",
    "request": "/requests/{request}/",
    "usage": "/usage/",
    "usage-by-model": "/usage/?by=model&show=tokens&period=dates&table=usage",
    "keys": "/keys/?show=all",
    "events": "/events/",
    "alerts": "/alerts/",
    "event": "/events/{event}/",
    "system": "/system/",
    "settings": "/settings/",
    "not-violated": "/no/such/page/",
}
PLANNING = {
    "scaling": "/scaling/",
    "plan": "/scaling/?plan={plan}",
    "calendar": "/scaling/calendar/",
    "models": "/models/",
    "model": "/models/llama-3.1-8b/",
    "model-tables": "/models/llama-3.1-8b/?table=demand&hours=1",
}
"""Pages that need forecasts, plans and moves."""
WITH_DATA = {
    "overview-table", "instance", "instance-failed", "node", "request", "usage-by-model", "event", "settings",
    "not-violated", "plan", "model", "model-tables",
}  # fmt: skip
FIRST_DAY = {name: path for name, path in (PAGES | PLANNING).items() if name not in WITH_DATA} | {
    name: f"/{name}/" for name in ("batches", "applications", "queues")
}
LIVE = ("overview", "fleet", "instance", "events", "system")


def advice() -> ScalingPlan:
    return ScalingPlan.objects.filter(status=PlanStatus.ADVICE).latest("pk")


def address(name: str) -> str:
    if name in PLANNING:
        return PLANNING[name].format(plan=advice().pk) if "{plan}" in PLANNING[name] else PLANNING[name]
    request = LedgerRow.objects.exclude(trace=[]).first()
    event = Event.objects.filter(kind="instance.moved").first()
    return PAGES[name].format(request=request.pk if request else 0, event=event.pk if event else 0)


def settle(page) -> None:
    """Wait until every chart has been in view and drawn, and no transition runs."""
    for plot in page.locator("[data-plot]").all():
        plot.evaluate(
            "each => each.scrollIntoView()"
        )  # at once: a region may be drawn anew while one waits for it to rest
        expect(plot.locator(".main-svg").first).to_be_visible()
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(400)


def violations(page) -> list[str]:
    violated = Axe().run(page, options=RULES).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:160]} {node['failureSummary'][:300]}"
        for rule in violated
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PAGES)
def test_with_data(console, open_page, complaints, name, theme):
    complaints.allowed = ("status of 404",) if name == "not-violated" else ()
    look(open_page(console, address(name), theme=theme), f"{name}-{theme}")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", PLANNING)
def test_planning(furnished, open_page, name, theme):
    look(open_page(furnished, address(name), theme=theme), f"{name}-{theme}")


def look(page, name: str) -> None:
    """On a desktop, and on a phone, where nothing is wider than the window."""
    settle(page)
    assert violations(page) == []
    keep(page, f"{name}-1440")
    page.set_viewport_size(PHONE)
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")  # charts are drawn again
    page.wait_for_timeout(300)
    assert violations(page) == []
    keep(page, f"{name}-390")


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("name", FIRST_DAY)
def test_without_data(empty_console, open_page, name, theme):
    page = open_page(empty_console, FIRST_DAY[name], theme=theme)
    settle(page)
    assert violations(page) == []
    keep(page, f"{name}-empty-{theme}-1440")


@pytest.fixture
def silent(console):
    """The console while its gateway is silent, long enough for pages to say so."""
    console.speaker.stop()
    yield console
    console.speaker.start()


@pytest.mark.parametrize("theme", THEMES)
def test_disconnected(silent, open_page, theme):
    page = open_page(silent, "/", theme=theme)
    expect(page.locator("[data-live]")).to_have_attribute("data-word", "disconnected", timeout=40_000)
    for name in LIVE:
        page.goto(address(name))
        expect(page.locator("[data-live]")).to_have_attribute("data-word", "disconnected")
        settle(page)
        assert violations(page) == [], name
        keep(page, f"{name}-disconnected-{theme}-1440")


@pytest.mark.parametrize("theme", THEMES)
def test_signed_out_and_dialogs(console, open_page, theme):
    page = open_page(console, "/sign-in/", user=None, theme=theme)
    assert violations(page) == []
    keep(page, f"sign-in-{theme}-1440")
    page = open_page(console, f"/fleet/instances/{seed.DRAINED}/", theme=theme)
    page.get_by_role("button", name="Stop…").click()
    assert violations(page) == []
    keep(page, f"stop-dialog-{theme}-1440")
