"""Context of every console template: navigation, and freshness of the live numbers."""

import time
from dataclasses import dataclass, replace
from datetime import datetime

from django.http import HttpRequest
from django.utils import timezone

from controlplane import __version__
from controlplane.accounts.models import Role
from controlplane.console.access.roles import may, role_of
from controlplane.console.live.feed import feed
from controlplane.console.live.fragments import BADGES, badge
from controlplane.console.live.state import SOURCE_TEXT, LiveState, Source

DELAYED_S = 3.0  # three intervals of the live connection
LOST_S = 15.0


@dataclass(frozen=True, slots=True)
class Section:
    """A page of an entry, which its tabs name; `pages` are those that are reached from it."""

    url_name: str
    label: str
    pages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Entry:
    label: str
    icon: str
    sections: tuple[Section, ...]
    beside: tuple[str, str] = ("", "")
    """Name and label of a section that has a link of its own beside the entry's."""

    @property
    def url_name(self) -> str:
        return self.sections[0].url_name

    def section_of(self, page: str) -> Section | None:
        return next((one for one in self.sections if page == one.url_name or page in one.pages), None)


def _entry(label: str, icon: str, *pages: str) -> Entry:
    return Entry(label, icon, (Section(pages[0], label, pages[1:]),))


OVERVIEW = Entry("Overview", "overview", (Section("overview", "Overview"), Section("timeline", "Timeline")))
FLEET = _entry("Fleet", "instances", "fleet", "instance", "node")
REQUESTS = Entry("Requests", "requests", (
    Section("requests", "Requests", ("request",)), Section("playground", "Playground"),
))  # fmt: skip
MODELS = _entry("Models", "models", "models", "model", "deploy", "deployed")
QUEUES = _entry("Queues", "queues", "queues")
BATCHES = _entry("Batches", "batches", "batches", "batch")
APPLICATIONS = _entry("Applications", "applications", "applications", "application", "run")
SCALING = Entry("Scaling", "scaling", (Section("scaling", "Scaling"), Section("calendar", "Calendar")))
WHAT_IF = _entry("What-if", "what-if", "what-ifs", "what-if", "new-what-if")
CAPACITY = _entry("Capacity", "capacity", "capacity", "capacity-plan")
USAGE = Entry(
    "Usage", "usage", (Section("usage", "Usage", ("prices",)), Section("keys", "Keys and budgets")), ("keys", "Keys")
)  # fmt: skip
API = Section("api-docs", "API")
SYSTEM = Entry("System", "system", (
    Section("alerts", "Alerts"), Section("events", "Events", ("event",)), Section("system", "Jobs"),
    Section("users", "Users and access", ("user-link",)), Section("settings", "Settings"), API,
), ("api-docs", "API"))  # fmt: skip
LEAST = {"system": Role.OPERATOR, "users": Role.ADMIN}
"""Of the sections that viewers do not see."""


def navigation(request: HttpRequest) -> list[tuple[str, tuple[Entry, ...]]]:
    """Return groups of entries with their headings; only pages that this user can open."""
    if may(request, Role.VIEWER):
        seen = (one for one in SYSTEM.sections if may(request, LEAST.get(one.url_name, Role.VIEWER)))
        system = replace(SYSTEM, sections=tuple(seen))
        return [
            ("", (OVERVIEW, FLEET, REQUESTS)),
            ("Serve", (MODELS, QUEUES, BATCHES, APPLICATIONS)),
            ("Plan", (SCALING, WHAT_IF, CAPACITY)),
            ("Administer", (USAGE, system)),
        ]
    return [("", (USAGE, REQUESTS, BATCHES, APPLICATIONS, Entry("API", "api", (API,))))]


def freshness(state: LiveState) -> dict[str, str]:
    """Return the freshness badge next to the title, as rendered by the server; `live.js` updates it.

    `word` is live, delayed or disconnected; `text` is its label.
    """
    if state.ts is None:
        return {"word": "disconnected", "text": f"No live numbers, {SOURCE_TEXT.get(state.source, 'retrying')}"}
    moment = datetime.fromtimestamp(state.ts, timezone.get_current_timezone()).strftime("%H:%M:%S")
    seconds = max(0.0, time.time() - state.ts)
    if state.source in (Source.SILENT, Source.UNREACHABLE) or seconds > LOST_S:
        why = SOURCE_TEXT.get(state.source, "retrying")
        return {"word": "disconnected", "text": f"Disconnected, showing {moment}, {why}"}
    if seconds > DELAYED_S:
        return {"word": "delayed", "text": f"Delayed, {int(seconds)} s"}
    return {"word": "live", "text": f"Live, updated {int(seconds)} s ago"}


def console(request: HttpRequest) -> dict[str, object]:
    # Admin and error pages without a user need no queries.
    if not getattr(request, "user", None) or not request.user.is_authenticated or request.path.startswith("/admin/"):
        return {"version": __version__}
    match = request.resolver_match
    role, alerts = role_of(request), feed.latest().alerts
    entries, page = navigation(request), (match.url_name or "") if match and match.app_name == "console" else ""
    entry = next((one for _, group in entries for one in group if one.section_of(page)), None)
    return {
        "version": __version__,
        "zone": timezone.get_current_timezone_name(),
        "base_url": request.build_absolute_uri("/").rstrip("/"),
        "navigation": entries,
        "page_name": page,
        "entry": entry,
        "section": entry and entry.section_of(page),
        "fleet_role": role,
        "is_operator": may(request, Role.OPERATOR),
        "sees_admin": may(request, Role.ADMIN),
        "badges": {name: (name, badge(alerts, name)) for name in BADGES} if role else {},
    }
