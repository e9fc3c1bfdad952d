"""The queues page over a real dispatcher whose queues are full: looked at, and a group moved, in Chromium and over Redis."""

import asyncio
import re
import threading
import time

import pytest
from playwright.sync_api import expect

from controlplane.dispatch.queues.commands import Commands
from controlplane.dispatch.queues.operations import QueueOperations
from controlplane.dispatch.queues.view import QueuesView
from controlplane.events.models import Event
from controlplane.jobs.record import Job
from scheduling.fleet.state import FleetState
from tests.dispatch.test_reordering import Served
from tests.e2e.conftest import DESKTOP, PHONE, keep
from tests.e2e.test_accessibility import settle, violations

MODEL, REGION = "llama-3.1-8b", "us-east"
PAGE = f"/queues/?region={REGION}"


def _no_snapshot() -> FleetState:
    raise AssertionError("nobody forks this fleet")


class QueueGateway(threading.Thread):
    """A dispatcher with two busy instances and four groups behind each, that publishes them and takes commands."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(daemon=True)
        self.redis_url = redis_url
        self.served = Served(model=MODEL, region=REGION, epoch_s=time.time())
        # What is lost within the minutes of these tests is grouped again: but for one class they have time.
        for due_s, count in ((6000.0, 2), (400.0, 6), (3000.0, 8), (5.0, 4), (36000.0, 8)):
            for _ in range(count):
                self.served.ask(due_s, output=400)
        self.served.finish()  # so that of one group some run and some wait
        self.tables = QueuesView(self.served.dispatcher)()
        self._over = threading.Event()

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        operations = QueueOperations(self.served.dispatcher)
        job = Job("queue-commands", "gateway", 1.0)
        commands = Commands(self.redis_url, lambda: "", operations, lambda: True, job, snapshot=_no_snapshot)
        taking = asyncio.create_task(commands.run())
        view, began_s = QueuesView(self.served.dispatcher), time.monotonic()
        while not self._over.is_set():
            self.served.now_s = time.monotonic() - began_s
            self.tables = view()
            await asyncio.sleep(0.2)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await commands.stop()

    def stop(self) -> None:
        self._over.set()
        self.join(10)


@pytest.fixture(scope="module")
def full_queues(console):
    """The console with the queues of a gateway."""
    gateway, feed = QueueGateway(console.redis.url), console.speaker.feed
    summary = feed.summary
    feed.summary = lambda ts: summary(ts) | {"queues": gateway.tables}
    gateway.start()
    yield console
    feed.summary = summary
    gateway.stop()


def blocks(page):
    return page.locator("#lanes .group-block")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(full_queues, open_page, theme):
    page = open_page(full_queues, PAGE, theme=theme)
    expect(blocks(page).first).to_be_visible()
    violated = {"queues": violations(page)}
    keep(page, f"queues-{theme}-1440")
    blocks(page).first.click()
    expect(page.locator("#group-title")).to_contain_text("Group ")
    settle(page)
    violated["queues-group"] = violations(page)
    keep(page, f"queues-group-{theme}-1440")
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(400)
    violated["queues-phone"] = violations(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    keep(page, f"queues-group-{theme}-390")
    page.set_viewport_size(DESKTOP)
    assert violated == {name: [] for name in violated}


@pytest.mark.gate
def test_a_group_is_bumped(full_queues, open_page):
    page = open_page(full_queues, PAGE)
    last = page.locator("#lanes ol.track").first.locator(".group-block").last
    name = last.get_attribute("id")
    number = int(name.removeprefix("group-"))
    last.click()
    expect(page.locator("#group-title")).to_have_text(f"Group {number}")
    page.locator("#group").get_by_role("button", name="Bump").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Reason").fill("a customer waits for it")
    dialog.get_by_role("button", name="Bump").click()
    first = page.locator("#lanes ol.track").first.locator(".group-block").first
    expect(first).to_have_attribute("id", name)
    expect(first).to_have_attribute("aria-label", re.compile("pinned"))
    event = Event.objects.filter(kind__startswith="queue_group.").latest("pk")
    assert (event.kind, event.actor, event.reason) == ("queue_group.bumped", "operator", "a customer waits for it")


def test_arrows_walk_along_the_blocks(full_queues, open_page):
    page = open_page(full_queues, PAGE)
    track = page.locator("#lanes ol.track").first
    expect(track).to_have_class(re.compile("laid"))  # from when keys are heard, and short blocks are joined to others
    seen = track.locator(".group-block:visible")
    first, second = (seen.nth(at).get_attribute("id") for at in (0, 1))
    track.locator(f"#{first}").focus()
    page.keyboard.press("ArrowRight")
    expect(track.locator(f"#{second}")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#group-title")).to_contain_text("Group ")
