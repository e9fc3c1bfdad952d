"""Context of every console template: navigation, and freshness of the live numbers."""

import time
from dataclasses import dataclass
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
class Entry:
    url_name: str
    label: str
    icon: str
    key: str  # second key of the shortcut `g …`
    pages: tuple[str, ...] = ()  # further pages of the entry


FLEET = (
    Entry("overview", "Overview", "overview", "o"),
    Entry("instances", "Instances", "instances", "i", ("instance",)),
    Entry("nodes", "Nodes", "nodes", "h"),
    Entry("requests", "Requests", "requests", "r", ("request",)),
)
SERVE = (
    Entry("models", "Models", "models", "d", ("deploy", "deployed")),
    Entry("queues", "Queues", "queues", "q"),
    Entry("batches", "Batches", "batches", "b", ("batch", "spot")),
    Entry("applications", "Applications", "applications", "a", ("application", "run")),
)
PLAN = (
    Entry("forecast", "Forecast", "forecast", "f"),
    Entry("scaling", "Scaling", "scaling", "s", ("plans", "plan", "moves")),
    Entry("what-ifs", "What-if", "what-if", "w", ("what-if", "new-what-if")),
    Entry("lengths", "Lengths", "lengths", "l"),
)
TENANTS = (
    Entry("usage", "Usage", "usage", "u"),
    Entry("keys", "API keys", "keys", "k"),
)
API = Entry("api-docs", "API", "api", "c")
SYSTEM = (
    Entry("system", "System", "system", "y"),
    Entry("alerts", "Alerts", "alerts", "n"),
    Entry("settings", "Settings", "settings", "t"),
    Entry("events", "Events", "events", "e", ("event",)),
    API,
)


def navigation(request: HttpRequest) -> list[tuple[str, tuple[Entry, ...]]]:
    """Return groups of entries with their headings; only pages that this user can open."""
    if may(request, Role.VIEWER):
        system = SYSTEM if may(request, Role.OPERATOR) else SYSTEM[1:]
        return [("", FLEET), ("Serve", SERVE), ("Plan", PLAN), ("Tenants", TENANTS), ("System", system)]
    return [("", (TENANTS[0], FLEET[-1], *SERVE[-2:], PLAN[-1], TENANTS[1])), ("System", (API,))]


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
    role, problems = role_of(request), feed.latest().problems
    return {
        "version": __version__,
        "zone": timezone.get_current_timezone_name(),
        "base_url": request.build_absolute_uri("/").rstrip("/"),
        "navigation": navigation(request),
        "page_name": match.url_name if match and match.app_name == "console" else "",
        "fleet_role": role,
        "is_operator": may(request, Role.OPERATOR),
        "sees_admin": may(request, Role.ADMIN),
        "badges": {entry: (name, badge(problems, name)) for name, (entry, _) in BADGES.items()} if role else {},
    }
