"""What-if pages: the list, and the comparison of one what-if's futures."""

from datetime import datetime
from typing import Any, Final

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_safe

from controlplane import kernels
from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.charts.spec import Chart
from controlplane.console.formats import NONE, points_signed, signed
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.what_if import charts as drawn
from controlplane.console.pages.what_if.compare import facts, in_words, rows_of, runs_of, sentence, state_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.filters import number
from controlplane.resources.tables import Table
from controlplane.simulation.whatif import plan, selectors, services, twin_errors
from controlplane.simulation.whatif.models import LETTERS, WhatIf, WhatIfState
from controlplane.simulation.whatif.working import OPEN
from scheduling.simulation.measures.comparison import Verdict

SHOWN: Final = 100
MORE_SEEDS: Final = 5
READY: Final = (
    ("What if demand doubles?", "demand-edit=factor&demand-by=2&chosen=yes&preset=pilothouse&preset=qlm"),
    ("Is another policy cheaper?", "chosen=yes&preset=pilothouse&preset=preserve&preset=sageserve-lt-ua&preset=qlm"),
)
SCOPES: Final = (("all", "All classes"), ("interactive", "Interactive"))
MISSING: Final = (WhatIfState.CANCELLED, WhatIfState.FAILED)


@require_safe
@fleet_role(Role.VIEWER)
def what_ifs(request: HttpRequest) -> HttpResponse:
    rows: list[Any] = list(selectors.what_ifs()[:SHOWN])
    context = {
        "rows": [(row, state_of(row.state), LETTERS[: row.futures_count], _share(row)) for row in rows],
        "ready": READY,
        "any_open": any(row.state in OPEN for row in rows),
        "twin": _twin(),
    }
    return render(request, "console/what_if/list.html", context)


def _twin() -> list[dict[str, Any]]:
    """Return a row for each judged profile."""

    def percent_of(value: float | None) -> str:
        return NONE if value is None else f"{signed(100 * value)}%"

    return [
        {
            "model": model,
            "gpu": gpu,
            "cells": [percent_of(band.last.get(name)) for name in twin_errors.MEASURES],
            "slo": NONE if "slo_met" not in band.last else points_signed(band.last["slo_met"]),
            "within": NONE if "ttft_p95" not in band.within else f"±{100 * band.within['ttft_p95']:.0f}%",
            "windows": band.windows,
            "requests": band.requests,
            "to_at": band.to_at.timestamp(),
        }
        for (model, gpu), band in twin_errors.twin_errors().items()
    ]


def _share(row: Any) -> float | None:
    """Return the share of runs that are done; None once it has ended."""
    return row.runs_done / row.runs_count if row.state in OPEN and row.runs_count else None


@require_safe
@fleet_role(Role.VIEWER)
def what_if(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Show the comparison; the address says what is chosen, counted and drawn."""
    row = get_object_or_404(WhatIf, pk=pk)
    seen = _ComparisonPage(request, row)
    if request.GET.get("format") == "csv":
        for chart in seen.charts():
            if chart.key == request.GET.get("table"):
                return chart.csv(f"what-if-{pk}-{chart.key}")
        return Table(selectors.FUTURES_HEADER, map(list, selectors.futures(row, seen.scope))).csv(f"what-if-{pk}")
    return render(request, "console/what_if/compare.html", seen.context())


@require_GET
@fleet_role(Role.VIEWER)
def charts(request: HttpRequest, pk: int) -> HttpResponse:
    return redrawn(request, _ComparisonPage(request, get_object_or_404(WhatIf, pk=pk)).charts())


def page_of(row: WhatIf) -> str:
    """Return the address of the what-if *row*, or of the list once it is deleted."""
    return reverse("console:what-if", args=[row.pk]) if row.pk else reverse("console:what-ifs")


@action(Role.OPERATOR, WhatIf, page=page_of, needs_reason=False)
def act(form: ActionForm, row: WhatIf, action: str) -> str:
    """Carry out *action* on a what-if; the plan of a future alone keeps a reason."""
    user = form.user
    match action:
        case "cancel":
            services.cancel(row, user)
            return "Cancelled; finished runs stay."
        case "resume":
            services.resume(row, user)
            return "The missing runs continue."
        case "add-seeds":
            services.add_seeds(row, number(form.fields.get("count", "")) or MORE_SEEDS, user)
            return "More seeds run."
        case "delete":
            services.delete(row, user)
            return f"“{row}” is deleted."
        case "plan":
            letter = form.fields.get("future", "")
            plan.make_plan(row, letter, user, form.reason)
            return f"Future {letter} is now the plan. The event has what was before."
    raise ActionError(f"There is no action {action!r}.")


class _ComparisonPage:
    """One what-if as an address shows it."""

    def __init__(self, request: HttpRequest, row: WhatIf) -> None:
        self.row, self.asked, self.user = row, request.GET, user_of(request)
        self.scope = self._one("scope", [name for name, _ in SCOPES])
        self.progress: dict[str, Any] = selectors.progress(row.pk) or {}
        self.compared = selectors.comparison(row, self.scope)
        self.rows = rows_of(self.compared, self.progress)
        self.curves = selectors.curves(row)
        self.classes = sorted({name for each in self.curves.values() for name in each["ttft_p95_ms"]})
        self.slo_class = self._one("class", self.classes or [""])

    def _one(self, name: str, names: Any) -> str:
        given = self.asked.get(name, "")
        return given if given in names else next(iter(names))

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the future of the address; else the plan, the cheapest that meets the SLO, or the last."""
        wanted = self.asked.get("future") or self.row.plan.get("letter", "")
        cheapest = [row for row in self.rows if row["verdict"].text == Verdict.CHEAPEST]
        named = [row for row in self.rows if row["letter"] == wanted]
        return (named or cheapest or self.rows)[0 if named or cheapest else -1]

    def charts(self) -> list[Chart]:
        row = self.row
        at = timezone.localtime(datetime.fromisoformat(row.start["at"]) if row.start else row.created_at)
        return [
            drawn.cost(self.rows, self.compared["target"]),
            drawn.latency(self.rows, self.curves, self.slo_class, at),
        ]

    def context(self) -> dict[str, Any]:
        row, chosen = self.row, self.chosen
        cost, latency = self.charts()
        edits = selectors.edits_in_words(row)
        known = [each["requests"]["mean"] for each in self.compared["futures"] if each["requests"]]
        return {
            **live_context(feed.state(), f"what-if:{row.pk}"),
            "what_if": row,
            "run": self._run(facts(row, edits, known[0] if known else None, "Every future sees the same requests")),
            "remarks": row.start.get("remarks", [])[1:],
            "futures": self.rows,
            "runs": runs_of(self.rows),
            "chosen": chosen | {"sentence": sentence(chosen, row.slo_target)} | self._choice(chosen),
            "plan_made": plan_made(row),
            "scopes": [(name, label, name == self.scope) for name, label in SCOPES],
            "cost": cost,
            "latency": latency,
            "classes": self.classes,
            "slo_class": self.slo_class,
            "more_seeds": MORE_SEEDS,
            "copy_address": row.asked,
        }

    def _run(self, about: list[tuple[str, str, str]]) -> dict[str, Any]:
        done = self.progress
        row = self.row
        whole = sum(each["whole"] for each in self.rows)
        failed = sum(each["state"] == WhatIfState.FAILED for each in self.rows)
        texts = {
            WhatIfState.RUNNING: f", {whole} of {len(self.rows)} futures done",
            WhatIfState.CANCELLED: f" by {row.ended_by}, {whole} of {len(self.rows)} futures kept"
            if row.ended_by
            else "",
            WhatIfState.DONE: f", {failed} of {len(self.rows)} futures failed" if failed else "",
        }
        return {
            "verdict": state_of(row.state, texts.get(WhatIfState(row.state), ""), failed=failed > 0),
            "text": in_words(done, kernels.progress() if row.state in OPEN else None),
            "open": row.state in OPEN,
            "missing": row.state not in OPEN and any(each["state"] in MISSING for each in done["futures"]),
            "share": done["done"] if row.state in OPEN else None,
            "facts": about,
        }

    def _choice(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Return the changes of the fleet that the chosen future needs, whether it can become the plan, and warnings."""
        row = self.row
        future = row.futures.get(letter=chosen["letter"])
        if why := _why_not(row, chosen):
            becomes = [(f"{at}.", text) for at, text in enumerate(chosen["words"], 1)]
            return {"becomes": becomes, "why_not": why}
        try:
            wanted, warnings = plan.wanted(row, future), plan.warnings(row, future)
            plan.check_rights(wanted, self.user)
        except ActionError as refusal:
            return {"becomes": [], "why_not": str(refusal)}
        changes = [text for text in chosen["words"] if text not in wanted.assumed]
        assumed = [*wanted.assumed, *selectors.edits_in_words(row)]
        becomes = [("Changes", text) for text in changes] + [("Assumed", text) for text in assumed]
        becomes.append(("Instances", "proposed as plans, which an operator approves"))
        return {"becomes": becomes, "can_become": True, "warnings": warnings}


def _why_not(row: WhatIf, chosen: dict[str, Any]) -> str:
    if row.start.get("kind") != "fleet":
        return "Only a what-if that began from the live fleet can become a plan."
    if not chosen["words"]:
        return "As now needs no plan."
    return "" if chosen["whole"] else "It can become the plan once all its seeds are done."


def plan_made(row: WhatIf) -> str:
    """Describe who made which future the plan; empty if none was."""
    if not row.plan:
        return ""
    at = timezone.localtime(datetime.fromisoformat(row.plan["at"]))
    return f"{row.plan['letter']} became the plan on {at:%d %b %H:%M}, by {row.plan['by']}: {row.plan['note']}"
