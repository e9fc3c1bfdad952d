"""What-if in Chromium: asked by the form, followed, cancelled, resumed, compared, sent to someone else, made the plan.

There is no gateway and no Celery here: it begins with the ledger, and the test makes the runs as a worker does.
"""

import re

import pytest
from playwright.sync_api import expect

from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Model
from controlplane.planning import services
from controlplane.planning.models import WHAT_IF, ScalingPlan
from controlplane.simulation.whatif import working
from controlplane.simulation.whatif.models import WhatIf, WhatIfState
from tests.e2e.conftest import DESKTOP, PHONE, TABLET, cut, keep
from tests.e2e.test_accessibility import settle, violations

ASKED = "/what-if/new?start=ledger&seeds=2&chosen=yes&preset=qlm&policy-part=ordering&policy-value=ssjf"
BUSY = "&demand-edit=burst&demand-by=2&demand-from_s=120&demand-until_s=300&failure-what=region"


@pytest.fixture
def no_what_ifs(console):
    yield console
    WhatIf.objects.all().delete()
    ScalingPlan.objects.filter(strategy=WHAT_IF).delete()


def asks(page):
    """Fill in the form as a user does, and run it."""
    page.get_by_role("button", name="+ Factor").click()
    page.get_by_label("Demand: Times").fill("2")
    assert page.locator(".scroll:has(> .edits)").first.evaluate("each => each.scrollWidth - each.clientWidth") == 0
    side = page.locator("#what-if-side")
    expect(side).to_contain_text("2x demand")
    expect(side).to_contain_text("6 runs (3 futures × 2 repetitions)")  # noqa: RUF001
    keep(page, "what-if-form")
    page.get_by_role("button", name="Run 3 futures").click()
    expect(page).to_have_url(re.compile(r"/what-if/\d+/$"))


@pytest.mark.gate
def test_a_what_if_from_the_question_to_the_plan(no_what_ifs, open_page, browser):
    console = no_what_ifs
    page = open_page(console, ASKED)
    asks(page)
    run = page.locator("#what-if-run")
    expect(run).to_contain_text("Queued")
    working.work()
    expect(run).to_contain_text("1 of 6 runs")
    run.get_by_role("button", name="Cancel").click()
    expect(run).to_contain_text("cancelled, 0 of 2 repetitions kept")
    run.get_by_role("button", name="Resume").click()
    expect(run).to_contain_text("queued, 0 of 2 repetitions")
    while working.work() is not None:
        pass
    expect(run).to_contain_text("Done")
    table = page.get_by_role("region", name="Futures, table")
    expect(table.get_by_role("row")).to_have_count(4)
    expect(table.get_by_role("row").nth(2)).to_contain_text("policy to QLM")
    page.keyboard.press("2")
    expect(page).to_have_url(re.compile("future=B"))
    expect(page.locator(".choice")).to_contain_text("B")
    with page.expect_download() as file:
        run.get_by_role("link", name="CSV").click()
    assert file.value.path().read_text().count("\n") == 4

    address = page.url
    other = open_page(console, address.removeprefix(console.url), user="admin")
    expect(other.get_by_role("radio", name="B QLM")).to_be_checked()

    # What began with the ledger is no plan of the fleet; the rest of the way is the same for what began there.
    expect(page.locator(".choice")).to_contain_text("Only a what-if that began from the live fleet")
    row = WhatIf.objects.get()
    WhatIf.objects.update(start=row.start | {"kind": "fleet"})
    page.reload()
    page.get_by_role("button", name="Make this the plan").click()
    dialog = page.get_by_role("dialog", name="Make B, QLM, the plan")
    expect(dialog).to_contain_text("policy to QLM, all models")
    keep(page, "what-if-plan")
    for box in dialog.get_by_role("checkbox").all():  # asked twice where it keeps its promises seldom
        box.check()
    dialog.get_by_label("Reason").fill("tried for ten minutes")
    orders = Deployment.objects.filter(active=True).order_by("pk").values_list("ordering_policy", flat=True)
    before = list(orders)
    assert set(before) != {"qlm"}
    dialog.get_by_role("button", name="Make it the plan").click()
    expect(page.locator(".choice")).to_contain_text("B became the plan, by")
    assert set(orders.all()) == {"qlm"}
    assert Event.objects.filter(kind="what_if.made_the_plan", subject_id=str(row.pk)).count() == 1
    event = Event.objects.get(kind="what_if.made_the_plan", subject_id=str(row.pk))
    for name, values in event.before["values"].items():  # as an operator undoes it
        services.give(Model.objects.get(name=name), values, "test")
    assert list(orders.all()) == before


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_pages_are_accessible(no_what_ifs, open_page, theme):
    console = no_what_ifs
    for width in (DESKTOP, PHONE):
        name = "desktop" if width is DESKTOP else "phone"
        page = open_page(console, "/what-if/", viewport=width, theme=theme)
        expect(page.get_by_text("No what-if yet.")).to_be_visible()
        settle(page)
        assert violations(page) == []
        page.goto(f"{console.url}{ASKED}{BUSY}")
        settle(page)
        assert violations(page) == []
        keep(page, f"what-if-build-{theme}-{name}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_comparison_is_accessible(no_what_ifs, open_page, theme):
    console = no_what_ifs
    page = open_page(console, ASKED)
    asks(page)
    while working.work() is not None:
        pass
    assert WhatIf.objects.get().state == WhatIfState.DONE
    address = page.url.removeprefix(console.url)
    for width in (DESKTOP, PHONE):
        page = open_page(console, address, viewport=width, theme=theme)
        settle(page)
        assert violations(page) == []
        keep(page, f"what-if-{theme}-{'desktop' if width is DESKTOP else 'phone'}")
    assert cut(page, TABLET) == []
    keep(page, f"what-if-{theme}-tablet")
