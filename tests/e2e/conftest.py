"""A signed-in page in real Chromium, in front of a console that a test may break. A skip fails where REQUIRE_E2E is set."""

import contextlib
import os
import sqlite3
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from tests.e2e import seed
from tests.e2e.console_server import ROOT, ConsoleServer, chromium, missing_tools

# Playwright's synchronous interface keeps an event loop running, in which Django would refuse every query.
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "true")

PATIENCE_MS = 40_000  # machines that run tests are slow; nothing here measures time
expect.set_options(timeout=PATIENCE_MS)

RESULTS = ROOT / "test-results" / "console"
DESKTOP, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
TABLET = {"width": 900, "height": 900}
# No name is looked up: what a page would fetch from elsewhere fails at once, and so does what Chromium asks for itself.
CHROMIUM_ARGS = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"]
# What Chromium itself writes when a test takes the server away.
EXPECTED_WHEN_AWAY = (
    "net::ERR_CONNECTION_REFUSED",
    "net::ERR_CONNECTION_RESET",
    "WebSocket connection to",
    "net::ERR_EMPTY_RESPONSE",
    "net::ERR_FAILED",
)


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def tools():
    missing = missing_tools()
    if missing:
        word = f"browser tests need {missing} on PATH"
        if os.environ.get("REQUIRE_E2E"):
            pytest.fail(word)
        pytest.skip(word)


@pytest.fixture(scope="session")
def database(django_test_environment, django_db_blocker):
    """The test database, open to every test here for the whole run: the server in its own process reads the same file."""
    from django.conf import settings
    from django.test.utils import setup_databases, teardown_databases

    if "sqlite" not in settings.DATABASES["default"]["ENGINE"]:
        pytest.skip("browser tests share an SQLite file with the server; run them without DATABASE_URL")
    with django_db_blocker.unblock():
        kept = setup_databases(verbosity=0, interactive=False)
        yield Path(settings.DATABASES["default"]["NAME"])
        teardown_databases(kept, verbosity=0)


@pytest.fixture(scope="session")
def empty_database(database, tmp_path_factory):
    """A copy of the database with people only, made before the fleet is written."""
    from django.db import connection

    seed.people()
    copy = tmp_path_factory.mktemp("empty") / "empty.sqlite3"
    with connection.cursor() as cursor:  # copying the file itself would drop this process's locks on it
        cursor.execute("VACUUM INTO %s", [str(copy)])
    return copy


@pytest.fixture(scope="session")
def console(tools, empty_database, database, tmp_path_factory):
    """A fleet of 29 instances with traffic, requests, keys and events."""
    rows = seed.fleet()
    console = ConsoleServer(tmp_path_factory.mktemp("console"), database, rows)
    console.start()
    yield console
    console.stop()


@pytest.fixture(scope="module")
def restored(console, sessions, tmp_path_factory):
    """The console, whose rows are as they were before once the module is done."""
    from django.db import connection

    kept = tmp_path_factory.mktemp("kept") / "rows.sqlite3"
    with connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [str(kept)])
    yield console
    with contextlib.closing(sqlite3.connect(kept)) as rows:
        rows.backup(connection.connection)
    sessions.clear()


@pytest.fixture(scope="module")
def furnished(restored):
    """The console with demand, forecasts, plans, moves and comparisons."""
    from django.utils import timezone

    from tests.console import planning_rows

    planning_rows.furnish(timezone.now(), 8)
    return restored


@pytest.fixture(scope="module")
def batch_console(restored):
    """The console with batches, a spot pool, held work and an application."""
    from controlplane.accounts.models import Tenant
    from tests.applications.conftest import learned
    from tests.console import batch_rows

    donated = {row.pk: str(row.state) for row in batch_rows.furnish()}
    learned(Tenant.objects.get(name="acme"))
    feed = restored.speaker.feed
    summary, rows = feed.summary, feed.rows
    feed.rows = [row | {"state": donated.get(row["id"], row["state"])} for row in rows]
    feed.summary = lambda ts: summary(ts) | {"held": batch_rows.held(time.time())}
    yield restored
    feed.summary, feed.rows = summary, rows


@pytest.fixture(scope="session")
def empty_console(tools, empty_database, tmp_path_factory):
    """A console on its first day."""
    console = ConsoleServer(tmp_path_factory.mktemp("empty-console"), empty_database, [])
    console.start()
    yield console
    console.stop()


@pytest.fixture(scope="session")
def browser(tools):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_ARGS)
        yield browser
        browser.close()


class Complaints:
    """Everything that the browser complained of. What a test expects it allows, in words."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.allowed: tuple[str, ...] = ()

    def listen(self, page) -> None:
        page.on(
            "console", lambda message: self._hear(message.type, f"{message.text} {message.location.get('url', '')}")
        )
        page.on("pageerror", lambda error: self._hear("error", f"page error: {error}"))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.heard.append(text)

    def unexpected(self) -> list[str]:
        return [text for text in self.heard if not any(word in text for word in self.allowed)]


@pytest.fixture
def complaints():
    complaints = Complaints()
    yield complaints
    assert complaints.unexpected() == []


@pytest.fixture(scope="session")
def sessions():
    """Return cookies of signed-in users by console and name; the form and the Overview
    behind it are opened once for each.
    """
    return {}


@pytest.fixture
def open_page(browser, complaints, sessions):
    """`open_page(console, "/events/", …)`: a page in a fresh context, signed in as the operator unless *user* is another."""
    contexts = []

    def open_(console, path="/", *, user="operator", viewport=None, theme="dark", script=True, **options):
        context = browser.new_context(
            base_url=console.url,
            viewport=viewport or DESKTOP,
            color_scheme=theme,
            java_script_enabled=script,
            accept_downloads=True,
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        complaints.listen(page)
        if (console.url, user) in sessions:
            context.add_cookies(sessions[console.url, user])
        elif user:
            sign_in(page, user)
            sessions[console.url, user] = [each for each in context.cookies() if each["name"] == "sessionid"]
        page.goto(path)
        return page

    yield open_
    for context in contexts:
        context.close()


def cut(page, viewport) -> list[str]:
    """Return the tables and drawings that are wider than their panel in a window of *viewport*."""
    page.set_viewport_size(viewport)
    wider = "all => all.filter(one => one.scrollWidth > one.clientWidth)"
    wider += ".map(one => one.ariaLabel + ' by ' + (one.scrollWidth - one.clientWidth))"
    return page.locator(".scroll").evaluate_all(wider)


def sign_in(page, user: str) -> None:
    page.goto("/sign-in/")
    page.get_by_label("User name").fill(user)
    page.get_by_label("Password").fill(seed.PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(lambda url: "/sign-in/" not in url)


def keep(page, name: str) -> None:
    """Save a screenshot among the artefacts of the run."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=RESULTS / f"{name}.png", full_page=True)
