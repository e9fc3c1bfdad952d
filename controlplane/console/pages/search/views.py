"""Search over everything by name: the results in the dialog of every page, drawn here while one types."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import may, signed_in
from controlplane.console.context import navigation
from controlplane.console.lists import viewer_of
from controlplane.resources.alerts import ALERT_RULES
from controlplane.resources.applications import APPLICATIONS
from controlplane.resources.batches import BATCHES
from controlplane.resources.instances import INSTANCES
from controlplane.resources.inventory import MODELS, NODES, REGIONS
from controlplane.resources.keys import KEYS, TENANTS
from controlplane.resources.requests import REQUESTS
from controlplane.resources.resource import Rows, Viewer
from controlplane.resources.settings import SETTINGS
from controlplane.resources.tables import value
from controlplane.rows import containing
from controlplane.simulation.whatif.models import WhatIf

SHOWN = 6
"""Results of a kind."""


@dataclass(frozen=True, slots=True)
class Searched:
    """Rows of a kind, found by *fields*, of which the first is the name that is shown, with *note* beside it."""

    title: str
    rows: Callable[[Viewer], Rows]
    fields: tuple[str, ...]
    page: str
    key: str = ""
    """The field that the address of a row has."""
    parameter: str = ""
    """By which name its query has it; empty: its path does, by the name of the field."""
    note: str = ""
    least: Role | None = Role.VIEWER
    """Over the fleet; None: a tenant's people find their own."""
    whole: bool = False
    """Found by the whole name alone: there are too many to look into each."""

    def found(self, viewer: Viewer, text: str) -> list["Result"]:
        rows = self.rows(viewer)
        if isinstance(rows, QuerySet):
            rows = rows.filter(**{self.fields[0]: text}) if self.whole else containing(rows, text, *self.fields)
        else:
            rows = [row for row in rows if _fits(text, *(value(row, field) for field in self.fields))]
        return [self.result(row) for row in rows[:SHOWN]]

    def result(self, row: Any) -> "Result":
        of = {self.key: value(row, self.key)} if self.key else {}
        address = reverse(f"console:{self.page}", kwargs={} if self.parameter else of)
        query = f"?{urlencode({self.parameter: of[self.key]})}" if self.parameter else ""
        return Result(
            str(value(row, self.fields[0])), str(value(row, self.note) or "") if self.note else "", address + query
        )


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    note: str
    address: str


SEARCHED = (
    Searched("Models", MODELS.rows, ("name", "title"), "model", "name", note="title"),
    Searched("Instances", INSTANCES.rows, ("name", "url"), "instance", "name", note="state"),
    Searched("Nodes", NODES.rows, ("name", "address"), "node", "name", note="gpu_type"),
    Searched("Regions", REGIONS.rows, ("title", "name"), "fleet", "name", "region", note="name"),
    Searched("Tenants", TENANTS.rows, ("name", "title"), "usage", "name", "tenant", note="title", least=None),
    Searched("API keys", KEYS.rows, ("name", "prefix"), "keys", "prefix", "q", note="tenant", least=None),
    Searched("Batches", BATCHES.rows, ("public_id", "model"), "batch", "public_id", note="model", least=None),
    Searched("Applications", APPLICATIONS.rows, ("name",), "application", "pk", note="tenant", least=None),
    Searched("What-ifs", lambda viewer: WhatIf.objects.all(), ("title",), "what-if", "pk"),
    Searched("Alert rules", ALERT_RULES.rows, ("name", "model"), "alerts"),
    Searched("Settings", SETTINGS.rows, ("name", "purpose"), "settings", "name", "q"),
    Searched("Requests", REQUESTS.rows, ("request_id",), "request", "pk", note="model", least=None, whole=True),
)
"""What is searched, in the order of the results."""


@require_safe
@signed_in
def search(request: HttpRequest) -> HttpResponse:
    """Draw the pages and rows that have each word of `?q=` in their names; all pages where it is empty."""
    text, viewer = request.GET.get("q", "").strip()[:160], viewer_of(request)
    found = [("Pages", [page for page in pages(request) if _fits(text, page.name, page.note)])]
    kinds = [kind for kind in SEARCHED if kind.least is None or may(request, kind.least)] if text else []
    found += [(kind.title, kind.found(viewer, text)) for kind in kinds]
    return render(request, "console/parts/search_results.html", {"found": [one for one in found if one[1]]})


def pages(request: HttpRequest) -> Iterator[Result]:
    """Yield the pages of the navigation."""
    for _, entries in navigation(request):
        for entry in entries:
            for one in entry.sections:
                note = entry.label if one.label != entry.label else ""
                yield Result(one.label, note, reverse(f"console:{one.url_name}"))
    if may(request, Role.ADMIN):
        yield Result("Admin", "", reverse("admin:index"))


def _fits(text: str, *names: Any) -> bool:
    within = " ".join(map(str, names)).lower().replace("_", " ")
    return all(word in within for word in text.lower().replace("_", " ").split())
