"""What-if in Chromium: asked by the form, followed, one future cancelled, compared, sent to someone else, made the plan.

There is no gateway and no Celery here: it begins synthetic, and the test makes the runs as a worker does.
"""

import json
import re
import zlib
from datetime import timedelta

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.accounts.models import User
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.planning.models import WHAT_IF, ScalingPlan
from controlplane.simulation.whatif import plan, working
from controlplane.simulation.whatif.models import Future, TwinError, WhatIf, WhatIfState
from tests.e2e.conftest import DESKTOP, PHONE, TABLET, cut, keep
from tests.e2e.test_accessibility import settle, violations

MODEL = "llama-3.1-8b"
ASKED = "/what-if/new?start=synthetic&horizon=600&seeds=2&chosen=yes&preset=qlm&custom-ordering=ssjf"


@pytest.fixture
def no_what_ifs(console):
    yield console
    for row in WhatIf.objects.exclude(plan={}):  # of a test that failed on its way
        if "undone_at" not in row.plan:
            plan.undo(row, User.objects.filter(is_superuser=True).first() or row.requested_by)
    WhatIf.objects.all().delete()
    ScalingPlan.objects.filter(strategy=WHAT_IF).delete()


def asks(page, console):
    """Fill in the form as a user does, and run it."""
    page.get_by_role("button", name="+ Tenant").click()
    page.get_by_label("New tenants: Tenant").fill("newcomer")
    page.get_by_label("New tenants: Model").select_option(MODEL)
    page.get_by_label("New tenants: Rate").fill("2")
    side = page.locator("#what-if-side")
    expect(side).to_contain_text("new tenant newcomer: 2 requests/s")
    expect(side).to_contain_text("6 (3 futures × 2 seeds)")  # noqa: RUF001
    keep(page, "what-if-form")
    page.get_by_role("button", name="Run 3 futures").click()
    expect(page).to_have_url(re.compile(r"/what-if/\d+/$"))


def follows(page):
    """Results of the plan appear on its page without a reload."""
    came = page.locator("#what-if-followed")
    # Its requests are few: it has fewer instances than there are. A worker would move them once this is approved.
    expect(came).to_contain_text(re.compile(r"Plans that it proposed: \d+ waits? for approval"))
    page.locator("[data-plot]").first.scroll_into_view_if_needed()
    settle(page)
    assert violations(page) == []
    count = came.locator(".card-actions .primary").count()
    came.locator(".card-actions .primary").first.click()
    dialog = page.get_by_role("dialog", name="Approve the plan for")
    dialog.get_by_label("Reason").fill("the what-if asks for it")
    dialog.get_by_role("button", name="Approve").click()
    expect(came.locator('.plan-card[data-status="approved"]')).to_have_count(1)
    expect(came.locator(".card-actions .primary")).to_have_count(count - 1)
    places = came.get_by_role("region", name="Instances predicted and ready, table")
    place = places.get_by_role("row", name=re.compile(f"{MODEL} US West"))
    expect(place).not_to_contain_text("draining")
    ready = Instance.objects.filter(deployment__model__name=MODEL, state=InstanceState.READY)
    instance = ready.filter(deployment__region__name="us-west").first()
    Instance.objects.filter(pk=instance.pk).update(state=InstanceState.DRAINING)
    try:
        expect(place).to_contain_text("1 draining")
    finally:
        Instance.objects.filter(pk=instance.pk).update(state=InstanceState.READY)
    expect(place).not_to_contain_text("draining")


def hides(page):
    """A future is hidden by a key or a link and stays hidden in the address; A and one other always stay."""
    table, drawn = page.get_by_role("region", name="Futures, table"), page.locator("[data-chart^='what-if-over-']")
    expect(page.locator("[data-help]").first).to_be_visible()
    page.keyboard.press("3")
    expect(table.locator("tr.chosen")).to_contain_text("Custom")
    page.keyboard.press("h")
    expect(page).to_have_url(re.compile("hide=C"))
    expect(table.get_by_role("row")).to_have_count(3)
    expect(drawn).to_have_count(2)
    expect(table.get_by_role("link", name="Hide")).to_have_count(0)
    page.reload()
    expect(drawn).to_have_count(2)
    settle(page)
    assert violations(page) == []
    page.get_by_role("link", name="Show Custom").click()
    expect(drawn).to_have_count(3)
    expect(page).not_to_have_url(re.compile("hide="))
    expect(page.locator("[data-help]").first).to_be_visible()
    page.keyboard.press("2")
    expect(page).to_have_url(re.compile("future=B"))


def compares_decisions(page):
    """From the decisive figures side by side and back, and by keys from one difference to the next."""
    # What a quiet quarter of an hour decides is little: some differences are put in its place.
    rows = [[1.0 * at, "m", f"adds {at}", "" if at > 3 else f"adds {at}", at > 3] for at in range(9)]
    differ = [("instances", "us-east"), ("order", "us-west")]
    said = {
        "model": "m",
        "sentence": "It adds more.",
        "effect": "\N{MINUS SIGN}5 waiting within 15 min",
        "waiting": -5.0,
        "slo_met": None,
    }
    future = Future.objects.get(letter="B")
    future.decides = [{"at_s": 4.0, "kind": kind, "region": region, **said} for kind, region in differ]
    future.save()
    pairs = zlib.compress(json.dumps([[kind, region, 4, rows] for kind, region in differ]).encode())
    assert future.runs.filter(seed=1).update(pairs=pairs)
    effects = {f"{kind} {region}": [0.0, -5.0] for kind, region in differ}
    for run in future.runs.all():  # alike in each seed
        run.result = run.result | {"effects": effects}
        run.save()
    page.reload()
    where = page.url
    page.locator(".decides").get_by_role("link", name="Side by side").first.click()
    expect(page.locator(".first-difference")).to_have_count(1)
    settle(page)
    assert violations(page) == []
    keep(page, "what-if-decisions")
    for key, query in (("ArrowRight", "kind=order&region=us-west"), ("ArrowLeft", "kind=instances&region=us-east")):
        page.keyboard.press(key)
        expect(page).to_have_url(re.compile(query))
        expect(page.locator("[data-help]").first).to_be_visible()  # the script of the page listens
    with page.expect_download() as file:
        page.get_by_role("link", name="CSV").click()
    assert "First difference" in file.value.path().read_text()
    page.keyboard.press("b")
    expect(page.locator(".decides")).to_be_visible()
    page.goto(where)


@pytest.mark.gate
def test_a_what_if_from_the_question_to_the_plan(no_what_ifs, open_page, browser):
    console = no_what_ifs
    page = open_page(console, ASKED)
    asks(page, console)
    run = page.locator("#what-if-run")
    expect(run).to_contain_text("Queued")
    working.work()
    expect(run).to_contain_text("1 of 6 runs")
    run.get_by_role("button", name="Cancel Custom").click()
    expect(run).to_contain_text("cancelled, 0 of 2 seeds kept")
    while working.work() is not None:
        pass
    expect(run).to_contain_text("4 of 6 runs")
    run.get_by_role("button", name="Resume").click()
    expect(run).to_contain_text("queued, 0 of 2 seeds")
    while working.work() is not None:
        pass
    expect(run).to_contain_text("Done")
    table = page.get_by_role("region", name="Futures, table")
    expect(table.get_by_role("row")).to_have_count(4)
    expect(table.get_by_role("row").nth(2)).to_contain_text("policy to QLM")
    page.keyboard.press("2")
    expect(page).to_have_url(re.compile("future=B"))
    expect(page.locator(".choice")).to_contain_text("B")
    page.locator("#what-if-over-time").get_by_role("link", name="Waiting requests").click()
    expect(page.locator("#over-time-title")).to_have_text("Waiting requests over time")
    with page.expect_download() as file:
        run.get_by_role("link", name="CSV").click()
    assert file.value.path().read_text().count("\n") == 4

    hides(page)
    compares_decisions(page)

    address = page.url
    other = open_page(console, address.removeprefix(console.url), user="admin")
    expect(other.get_by_role("radio", name="B QLM")).to_be_checked()
    expect(other.locator("#over-time-title")).to_have_text("Waiting requests over time")

    # What began synthetic is no plan of a fleet; the rest of the way is the same for what began there.
    expect(page.locator(".choice")).to_contain_text("Only a what-if that began from the live fleet")
    row = WhatIf.objects.get()
    WhatIf.objects.update(start=row.start | {"kind": "fleet"})
    page.reload()
    page.get_by_role("button", name="Make this the plan").click()
    dialog = page.get_by_role("dialog", name="Make B, QLM, the plan")
    expect(dialog).to_contain_text("policy to QLM, all models")
    keep(page, "what-if-plan")
    dialog.get_by_label("Note").fill("tried for ten minutes")
    orders = Deployment.objects.filter(active=True).order_by("pk").values_list("ordering_policy", flat=True)
    before = list(orders)
    assert set(before) != {"qlm"}
    dialog.get_by_role("button", name="Make it the plan").click()
    expect(page.locator(".choice")).to_contain_text("B is the plan since")
    assert set(orders.all()) == {"qlm"}
    assert Event.objects.filter(kind="what_if.made_the_plan", subject_id=str(row.pk)).count() == 1
    follows(page)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".choice")).to_contain_text("It was the plan from")
    ended = set(ScalingPlan.objects.filter(strategy=WHAT_IF).values_list("status", flat=True))
    assert ended <= {"rejected", "superseded"}
    assert list(orders.all()) == before


def test_a_draft_is_kept_opened_run_or_deleted(no_what_ifs, open_page):
    console = no_what_ifs
    page = open_page(console, f"{ASKED}&title=Tomorrow")
    page.get_by_role("button", name="Keep as draft").click()
    expect(page.get_by_text("This is the draft “Tomorrow”.")).to_be_visible()
    page.get_by_label("Title").fill("The day after")
    page.keyboard.press("Control+s")
    expect(page.get_by_text("This is the draft “The day after”.")).to_be_visible()
    page.goto(f"{console.url}/what-if/")
    drafts = page.get_by_role("region", name="What-ifs, table")
    expect(drafts.get_by_role("row")).to_have_count(2)
    expect(drafts).to_contain_text("Draft")
    settle(page)
    assert violations(page) == []
    drafts.get_by_role("link", name="Open The day after").click()
    asks(page, console)
    assert [row.state for row in WhatIf.objects.all()] == [WhatIfState.QUEUED]
    page.goto(f"{console.url}{ASKED}")
    page.get_by_role("button", name="Keep as draft").click()
    expect(page.get_by_text("This is the draft")).to_be_visible()
    page.goto(f"{console.url}/what-if/")
    drafts.get_by_role("button", name="Delete").click()
    expect(drafts.get_by_role("row")).to_have_count(2)
    assert [row.state for row in WhatIf.objects.all()] == [WhatIfState.QUEUED]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_pages_are_accessible(no_what_ifs, open_page, theme):
    console = no_what_ifs
    for width in (DESKTOP, PHONE):
        name = "desktop" if width is DESKTOP else "phone"
        page = open_page(console, "/what-if/", viewport=width, theme=theme)
        expect(page.get_by_text("No what-if yet.")).to_be_visible()
        settle(page)
        assert violations(page) == []
        page.goto(
            f"{console.url}{ASKED}&demand-edit=burst&demand-by=2&demand-from=2&demand-until=5&failure-what=region"
        )
        settle(page)
        assert violations(page) == []
        keep(page, f"what-if-build-{theme}-{name}")


@pytest.fixture
def judged(no_what_ifs):
    """A replay under two bundles, and a window of a profile."""
    now = timezone.now()
    when = {"from_at": now - timedelta(hours=24), "to_at": now}
    measured = {"ttft_p50": 176.0, "ttft_p95": 614.0, "itl_p50": 74.0, "itl_p95": 113.0, "slo_met": 0.97}
    simulated = {"ttft_p50": 178.0, "ttft_p95": 602.0, "itl_p50": 72.0, "itl_p95": 113.0, "slo_met": 0.98}
    for model in (MODEL, "llama-3.2-3b"):
        TwinError.objects.create(
            model=model, gpu="2 x a100-80gb", requests=169, measured=measured, simulated=simulated, **when
        )
    yield no_what_ifs
    TwinError.objects.all().delete()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_twin_error_is_accessible(judged, open_page, theme):
    for width in (DESKTOP, PHONE):
        page = open_page(judged, "/what-if/", viewport=width, theme=theme)
        expect(page.locator("#twin-error")).to_contain_text(MODEL)
        settle(page)
        assert violations(page) == []
        keep(page, f"what-if-list-{theme}-{'desktop' if width is DESKTOP else 'phone'}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_comparison_is_accessible(no_what_ifs, open_page, theme):
    console = no_what_ifs
    page = open_page(console, ASKED)
    asks(page, console)
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
