"""What-if on the living fleet, the whole way: Chromium, gateway, Celery, and instances that start once it is approved."""

import re
import time
from collections import Counter

import pytest
from playwright.sync_api import Page, expect

from tests.bench._demo import demo
from tests.e2e.conftest import DESKTOP, PATIENCE_MS, keep

SEEN_S = 30.0
"""Of the demo's traffic, before it is forked."""
DONE_WITHIN_MS, MOVED_WITHIN_MS = 240_000, 240_000
PRESENT = ("provisioning", "loading", "ready")


@pytest.fixture
def page(tools, browser, complaints):
    """The Overview of a demo started for this, as its operator sees it."""
    with demo() as stack:
        time.sleep(SEEN_S)
        context = browser.new_context(viewport=DESKTOP, color_scheme="dark")
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints.listen(page)
        page.goto(stack.link)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_title(re.compile("Fleet overview"))
        yield page
        context.close()


def instances(page: Page) -> Counter:
    """Return instances by model and region, including starting ones."""
    rows = page.request.get(re.match(r"\w+://[^/]+", page.url)[0] + "/api/instances").json()
    return Counter((row["model"], row["region"]) for row in rows["items"] if row["state"] in PRESENT)


def test_the_fleet_follows_a_what_if_that_is_approved(page):
    (model, region), count = max(instances(page).items(), key=lambda item: item[1])
    page.goto(re.sub(r"(\w+://[^/]+).*", r"\1/what-if/new?start=fleet&horizon=600&seeds=2&chosen=yes", page.url))
    page.get_by_role("button", name="+ Bound").click()
    page.get_by_label("Bounds: Model").select_option(model)
    page.get_by_label("Bounds: Region").select_option(region)
    page.get_by_label("Bounds: At least").fill(str(count + 1))
    page.get_by_label("Bounds: At most").fill(str(count + 3))
    expect(page.locator("#what-if-side")).to_contain_text("4 (2 futures × 2 seeds)")  # noqa: RUF001
    page.get_by_role("button", name="Run 2 futures").click()
    expect(page.locator("#what-if-run")).to_contain_text("Done", timeout=DONE_WITHIN_MS)
    page.get_by_role("region", name="Futures, table").get_by_role("radio").nth(1).click()
    page.get_by_role("button", name="Make this the plan").click()
    page.get_by_label("Note").fill("one more of them")
    page.get_by_role("button", name="Make it the plan").click()
    came = page.locator("#what-if-followed")
    expect(came).to_contain_text("for approval")
    waiting = came.locator(".card-actions .primary")
    proposed = waiting.count()
    for left in range(proposed, 0, -1):
        waiting.first.click()
        dialog = page.get_by_role("dialog", name=re.compile("Approve the plan for"))
        dialog.get_by_label("Reason").fill("the what-if asks for it")
        dialog.get_by_role("button", name="Approve").click()
        expect(waiting).to_have_count(left - 1)
    expect(came.get_by_text("Carried out")).to_have_count(proposed, timeout=MOVED_WITHIN_MS)
    assert instances(page)[model, region] > count
    keep(page, "what-if-moved")
