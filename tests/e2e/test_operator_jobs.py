"""Everyday jobs from the page where a person is, in as many clicks as docs/operate/console.md says, without typing a reason.

Switching a bundle is in `test_models.py`, deploying a model in `test_deploy.py`.
"""

from datetime import timedelta

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.fleet.models import Instance
from controlplane.planning.models import PlanStatus, ScalingMove, ScalingPlan
from tests.e2e.test_accessibility import advice

COUNT_PRESSES = """addEventListener("pointerdown", () => {
  sessionStorage.presses = 1 + Number(sessionStorage.presses ?? 0);
}, true);"""


@pytest.fixture
def begin(furnished, open_page):
    """`begin(path)`: return a page that counts clicks from then on."""

    def begin_(path, **options):
        page = open_page(furnished, path, **options)
        page.context.add_init_script(COUNT_PRESSES)
        page.reload()
        page.evaluate("sessionStorage.presses = 0")
        return page

    return begin_


def clicks(page) -> int:
    return int(page.evaluate("sessionStorage.presses"))


def heading(page):
    return page.get_by_role("heading", level=1)


def go(page, name: str) -> None:
    page.get_by_role("navigation", name="Main").get_by_role("link", name=name).click()


@pytest.mark.gate
def test_draining_and_resuming_take_three_clicks_each(begin):
    name = "llama-3-2-3b-us-west-1"
    page = begin("/fleet/")
    page.get_by_role("link", name=name, exact=True).click()
    for verb, state in (("Drain", "draining"), ("Resume", "ready")):
        page.get_by_role("button", name=f"{verb}…").click()
        page.get_by_label("Reason").locator("visible=true").fill("kernel update")
        page.get_by_role("dialog").get_by_role("button", name=verb).click()
        expect(page.locator("#subject-state .status")).to_have_text(state.capitalize())
        assert Instance.objects.get(name=name).state == state
    assert clicks(page) == 5, "three, and two more on the same page"


def test_a_key_and_its_first_call_take_two_clicks(begin):
    page = begin("/keys/", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("textbox", name="Name", exact=True).fill("first call")
    page.get_by_role("combobox", name="Tenant").select_option("Acme Assistants")
    page.get_by_role("button", name="Create key").click()
    secret = page.get_by_role("status", name="Secret").text_content()
    page.get_by_role("button", name="Copy the curl").click()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert secret in copied
    assert "/v1/chat/completions" in copied
    assert '"stream": true' in copied
    assert clicks(page) == 2


@pytest.mark.gate
def test_the_slowest_request_of_the_last_hour_and_why_takes_two_clicks(begin):
    page = begin("/")
    page.locator("[data-tile=ttft_p95_ms]").get_by_role("link").click()
    expect(page.get_by_text("Slowest first")).to_be_visible()
    page.locator("table.rows tbody th a").first.click()
    expect(page.get_by_role("heading", name="Where the time went")).to_be_visible()
    expect(page.get_by_role("heading", name="Why this instance")).to_be_visible()
    assert clicks(page) == 2


@pytest.mark.gate
def test_the_top_tenant_by_cost_takes_one_click(begin):
    page = begin("/")
    go(page, "Usage")
    expect(heading(page)).to_have_text("Usage")
    assert clicks(page) == 1


@pytest.mark.gate
def test_approving_a_plan_takes_three_clicks(begin):
    plan = advice()
    page = begin("/")
    go(page, "Scaling")
    page.get_by_role("button", name=f"Approve… plan {plan.pk} for {plan.model}").click()
    dialog = page.get_by_role("dialog", name=f"Approve plan {plan.pk} for {plan.model}?")
    dialog.get_by_label("Reason").fill("the evening peak comes")
    dialog.get_by_role("button", name="Approve").click()
    expect(page.get_by_role("status").filter(has_text="is approved")).to_be_visible()
    assert clicks(page) == 3
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPROVED
    ScalingPlan.objects.filter(pk=plan.pk).update(status=PlanStatus.ADVICE)  # for the other tests


def test_what_moved_in_the_last_hour_and_why_takes_one_click(begin):
    page = begin("/")
    go(page, "Scaling")
    newest = ScalingMove.objects.filter(at__gte=timezone.now() - timedelta(hours=1)).latest("pk")
    expect(page.locator("#history tbody tr").filter(has_text=newest.reason).first).to_contain_text(newest.model)
    assert clicks(page) == 1
