"""The console as people use it: signing in, watching, losing the connection and regaining it, acting, mouse and keyboard."""

import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.accounts.models import ApiKey
from controlplane.alerts.models import Alert, AlertRule
from controlplane.events.models import Severity
from controlplane.fleet.models import Instance
from tests.e2e import seed
from tests.e2e.conftest import EXPECTED_WHEN_AWAY, keep
from tests.e2e.test_accessibility import violations

LIVE = re.compile(r"Live, updated \d s ago")


def badge(page):
    return page.locator("[data-live]")


def expect_live(page, timeout=15_000):
    expect(badge(page)).to_have_attribute("data-word", "live", timeout=timeout)
    expect(page.locator("[data-freshness]")).to_have_text(LIVE)


def expect_drawn(page, *charts):
    """Wait until Plotly has drawn these charts."""
    for chart in charts:
        expect(page.locator(f"#chart-{chart} .main-svg").first).to_be_visible()


def points(page, chart) -> int:
    return page.evaluate(f"document.querySelector('#chart-{chart} [data-plot]').data[0].x.length")


# Signing in


@pytest.mark.gate
def test_signing_in_and_out(console, open_page, complaints):
    complaints.allowed = ("status of 401",)
    page = open_page(console, "/events/", user=None)
    expect(page).to_have_url(re.compile(r"/sign-in/\?next=/events/"))
    page.get_by_label("User name").fill("operator")
    page.get_by_label("Password").fill("not this")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("Wrong user name or password.")
    page.get_by_label("Password").fill(seed.PASSWORD)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Events")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sign in")


# Watching


def test_first_paint_needs_no_script(console, open_page):
    page = open_page(console, "/", script=False)
    expect(page.locator("[data-tile] b")).to_have_count(8)
    for text in page.locator("[data-tile] b").all_text_contents():
        assert re.search(r"\d", text), text
    expect(page.locator("#chart-ttft [data-plot]")).to_have_count(1)
    expect(page.locator("#instances-panel tr[data-row]")).to_have_count(12)
    expect(page.get_by_role("button", name="Apply")).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    page.get_by_role("link", name="Show as table").first.click()
    expect(page.get_by_role("columnheader", name="p95 (ms)")).to_be_visible()
    page.goto("/fleet/?sort=-running")
    expect(page.locator('th[aria-sort="descending"]')).to_have_text(re.compile("Running"))


@pytest.mark.gate
def test_numbers_move_and_charts_grow(console, open_page):
    page = open_page(console, "/?range=60")
    expect_live(page)
    expect_drawn(page, "ttft")
    figure, row = (
        page.locator("[data-tile=output_tokens_per_s] b"),
        page.locator('#instances-panel tr[data-row] [data-fragment$="running:running_of"]').nth(6),
    )
    before = (figure.text_content(), row.text_content())
    expect(figure).not_to_have_text(before[0])
    expect(row).not_to_have_text(before[1])
    drawn = page.locator("#chart-ttft").get_attribute("data-drawn")
    expect(page.locator("#chart-ttft")).not_to_have_attribute("data-drawn", drawn, timeout=20_000)
    assert points(page, "ttft") > 100
    expect(page.locator("#chart-ttft [data-plot]")).to_have_attribute("aria-label", re.compile("p95 is"))


@pytest.mark.gate
def test_a_stopped_server_is_said_and_its_return_noticed(console, open_page, complaints):
    complaints.allowed = EXPECTED_WHEN_AWAY
    page = open_page(console, "/")
    expect_live(page)
    expect(page.locator(".js-plotly-plot").first).to_be_visible()  # or the server stops in the middle of plotly.js
    tile = page.locator("[data-tile=requests_per_s] .figure")
    colour = tile.evaluate("element => getComputedStyle(element).color")
    console.web.kill()
    try:
        expect(badge(page)).to_have_attribute("data-word", "disconnected", timeout=20_000)
        expect(page.locator("[data-freshness]")).to_have_text(
            re.compile(r"Disconnected, showing \d\d:\d\d:\d\d, retrying")
        )
        expect(page.locator("[data-announce]")).to_have_text("Disconnected.")
        assert tile.evaluate("element => getComputedStyle(element).color") != colour  # it stands still, and is grey
        keep(page, "server-away")
    finally:
        console.web.start()
    expect_live(page, timeout=40_000)
    number = page.locator("[data-tile=output_tokens_per_s] b")
    before = number.text_content()
    expect(number).not_to_have_text(before)


def test_a_silent_gateway_is_distinguished_from_a_lost_server(console, open_page):
    page = open_page(console, "/")
    expect_live(page)
    console.speaker.stop()
    try:
        expect(page.locator("[data-freshness]")).to_have_text(re.compile(r"Delayed, \d+ s"), timeout=20_000)
        expect(badge(page)).to_have_attribute("data-word", "delayed")
        expect(page.locator("[data-freshness]")).to_have_text(re.compile("the gateway is silent"), timeout=40_000)
        expect(page.get_by_role("heading", name=re.compile("The numbers below stand still"))).to_be_visible()
    finally:
        console.speaker.start()
    expect_live(page)
    expect(page.get_by_role("heading", name=re.compile("The numbers below stand still"))).to_have_count(0)


def test_pausing_holds_what_is_shown_and_resuming_catches_up(console, open_page):
    page = open_page(console, "/")
    expect_live(page)
    page.get_by_role("button", name="Pause").click()
    expect(badge(page)).to_have_attribute("data-word", "paused")
    number = page.locator("[data-tile=output_tokens_per_s] b")
    before = number.text_content()
    button = page.locator("[data-pause]")
    expect(button).to_have_text(re.compile(r"Resume, [4-9] s behind"), timeout=15_000)
    assert number.text_content() == before
    expect(page.locator("[data-freshness]")).to_have_text(re.compile(r"Paused, showing \d\d:\d\d:\d\d"))
    page.keyboard.press("p")
    expect(button).to_have_text("Pause")
    expect(number).not_to_have_text(before)
    expect_live(page)


@pytest.mark.gate
def test_a_new_event_and_a_lost_instance_appear(console, open_page):
    page = open_page(console, "/")
    expect_live(page)
    row = Instance.objects.get(name="llama-3-2-3b-us-east-1")
    said = next(said for said in console.speaker.feed.rows if said["id"] == row.pk)
    said["reachable"] = False
    now = timezone.now()
    alert = Alert.objects.create(  # as the process that judges does
        rule=AlertRule.objects.filter(condition="instance").first(), subject=row.name, severity="critical",
        title=f"{row.name} does not answer", since=now, opened_at=now, seen_at=now,
    )  # fmt: skip
    try:
        expect(page.locator('[data-fragment="attention"]')).to_contain_text(f"{row.name} does not answer")
        expect(page.locator("[data-alert]")).to_have_text(re.compile(f"{row.name} does not answer"))
        expect(page.locator(f'tr[data-row="instance/{row.pk}"] .status')).to_have_text("Unreachable", timeout=20_000)
        from controlplane.events.services import record

        record(
            "instance.moved",
            row,
            actor="gateway",
            before={"state": "ready"},
            after={"state": "failed"},
            reason="it is silent",
            severity=Severity.CRITICAL,
        )
        expect(page.locator('[data-fragment="events"] li').first).to_contain_text(f"{row.name}: ready to failed")
        expect(page.locator('[data-fragment="events"] li').first).to_contain_text("it is silent")
        expect(page.locator('[data-fragment="events"] li')).to_have_count(5)
    finally:
        said["reachable"] = True
        alert.delete()
    expect(page.locator('[data-fragment="attention"]')).not_to_contain_text(row.name)


@pytest.mark.gate
def test_filters_are_in_the_address(console, open_page):
    page = open_page(console, "/?model=llama-3.1-8b&range=5&table=kv")
    expect(page.get_by_role("combobox", name="Model")).to_have_value("llama-3.1-8b")
    names = page.locator("#chart-kv tbody th").all_text_contents()
    assert names
    assert all(name.startswith("llama-3-1-8b") for name in names)
    page.get_by_role("combobox", name="Model").select_option("bloom-176b")
    expect(page).to_have_url(re.compile("model=bloom-176b"))
    expect(page.locator("#instances-panel tr[data-row] td:nth-child(3)").first).to_have_text("bloom-176b")
    page.locator("#chart-ttft").get_by_role("link", name="Show as table").click()
    expect(page.locator("#chart-ttft table")).to_be_visible()
    expect(page).to_have_url(re.compile("table=ttft"))
    page.locator("#chart-ttft").get_by_role("link", name="Show as chart").click()
    expect_drawn(page, "ttft")


# Acting


def test_the_overview_of_one_model_stays_so(console, open_page):
    """The live connection pushes all models: this page's lists show only theirs."""
    model = "llama-3.1-8b"
    page = open_page(console, f"/?model={model}")
    number = page.locator("[data-tile=output_tokens_per_s] b")
    before = number.text_content()
    expect(number).not_to_have_text(before)
    for item in page.locator('[data-fragment="attention"] li').all():
        text = item.text_content()
        assert model in text or model.replace(".", "-") in text or "whole fleet" in text, text


@pytest.mark.gate
def test_a_key_is_made_copied_and_revoked(console, open_page):
    page = open_page(console, "/keys/", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_label("Name", exact=True).fill("nightly job")
    page.get_by_role("combobox", name="Tenant").select_option("Acme Assistants")
    page.get_by_role("button", name="Create key").click()
    secret = page.get_by_role("status", name="Secret").text_content()
    assert re.fullmatch(r"ph_[\w-]{43}", secret)
    keep(page, "key-created")
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == secret
    assert ApiKey.objects.filter(name="nightly job").count() == 1
    page.get_by_role("link", name="Done").click()
    expect(page.get_by_text(secret)).to_have_count(0)
    page.get_by_role("button", name="Revoke… nightly job").click()
    page.get_by_role("dialog").get_by_label("Reason").fill("the job moved")
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("row", name=re.compile("nightly job"))).to_have_count(0)
    assert ApiKey.objects.get(name="nightly job").revoked_at


# Themes and keys


@pytest.mark.gate
def test_the_theme_stays(console, open_page):
    page = open_page(console, "/", theme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(14, 17, 22)"
    button = page.locator("[data-theme-button]")
    expect(button).to_have_text("Theme: system")
    button.click()
    expect(button).to_have_text("Theme: light")
    assert page.evaluate(background) == "rgb(246, 247, 249)"
    page.goto("/fleet/")
    expect(button).to_have_text("Theme: light")
    assert page.evaluate(background) == "rgb(246, 247, 249)"
    page.keyboard.press("t")
    expect(button).to_have_text("Theme: dark")
    page.reload()
    expect(button).to_have_text("Theme: dark")


def test_charts_follow_the_theme(console, open_page):
    page = open_page(console, "/", theme="dark")
    expect_drawn(page, "ttft", "kv")
    colour = "document.querySelector('#chart-ttft [data-plot]').data[1].line.color"
    dark = page.evaluate(colour)
    page.keyboard.press("t")
    page.locator("html[data-theme=light]").wait_for()
    page.wait_for_timeout(1000)
    assert page.evaluate(colour) != dark


def test_everything_by_keyboard(console, open_page):
    page = open_page(console, "/events/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    # Everything is a few letters away.
    for shortcut, text, heading in (("/", "event", "Events"), ("Control+k", "keys budgets", "Keys and budgets")):
        page.keyboard.press(shortcut)
        dialog = page.get_by_role("dialog", name="Search")
        field = dialog.get_by_role("combobox", name="Search by name")
        expect(field).to_be_focused()
        page.keyboard.type(text)
        expect(dialog.get_by_role("option").first).to_contain_text(heading)
        with page.expect_navigation():
            page.keyboard.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    page.keyboard.press("Control+k")
    page.keyboard.type("llama us-east")
    second = dialog.get_by_role("option").nth(1)
    expect(dialog.get_by_role("group", name="Instances").get_by_role("option").first).to_contain_text("us-east")
    page.keyboard.press("ArrowDown")
    expect(second).to_have_attribute("aria-selected", "true")
    expect(page.get_by_role("combobox", name="Search by name")).to_have_attribute(
        "aria-activedescendant", second.get_attribute("id") or ""
    )
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.goto("/fleet/?q=us-east-3")
    # Sorting, opening and acting without a mouse.
    link = page.get_by_role("link", name="llama-3-1-8b-us-east-3")
    link.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("llama-3-1-8b-us-east-3")
    page.get_by_role("button", name="Drain…").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog").get_by_label("Reason")).to_be_focused()
    page.keyboard.type("p t / are letters here")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Drain…")).to_be_focused()
    # The list of a page is walked from anywhere, and a letter presses the button of the row.
    rows = "".join(
        f'<tr><th><a href="#{n}">{n}</a></th><td><button data-key="x">Cancel {n}</button></td></tr>'
        for n in ("One", "Two")
    )
    listed = f'<table class="running-table"><tbody>{rows}</tbody></table>'
    page.evaluate("html => document.querySelector('main').insertAdjacentHTML('beforeend', html)", listed)
    page.evaluate("document.activeElement.blur()")
    for key, focused in (("ArrowDown", "One"), ("ArrowDown", "Two"), ("ArrowUp", "One")):
        page.keyboard.press(key)
        expect(page.get_by_role("link", name=focused, exact=True)).to_be_focused()
    page.keyboard.press("x")
    expect(page.get_by_role("button", name="Cancel One")).to_be_focused()


def test_shortcuts_are_listed_and_can_be_switched_off(console, open_page):
    page = open_page(console, "/")
    expect_live(page)
    page.keyboard.press("?")
    help_ = page.get_by_role("dialog", name="Keyboard")
    expect(help_).to_be_visible()
    keep(page, "help")
    help_.get_by_label("Use single-key shortcuts").uncheck()
    help_.get_by_role("button", name="Close").click()
    page.keyboard.press("p")
    page.wait_for_timeout(300)
    expect(badge(page)).not_to_have_attribute("data-word", "paused")
    page.reload()
    page.keyboard.press("p")
    page.wait_for_timeout(300)
    expect(badge(page)).not_to_have_attribute("data-word", "paused")


# The first day


# The API


def test_api_docs_work_offline(console, open_page, complaints):
    complaints.allowed = ("escaping deep link whitespace",)  # Swagger UI's remark about tags of two words
    page = open_page(console, "/usage/", user="tenant")
    fetched = []
    page.on("request", lambda request: fetched.append(request.url))
    page.goto("/api/docs#/Inference/create_response")
    expect(page.get_by_text("the conversation comes whole as").first).to_be_visible()
    operations = sum(map(len, page.request.get("/api/openapi.json").json()["paths"].values()))
    expect(page.locator(".opblock")).to_have_count(operations)
    assert all(address.startswith((console.url, "data:")) for address in fetched)
