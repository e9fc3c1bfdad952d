"""What-if pages: the list, and the comparison of one what-if's futures."""

from datetime import datetime
from typing import Any, Final

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
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
from controlplane.console.lists import list_page
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.what_if import charts as drawn
from controlplane.console.pages.what_if.compare import (
    in_words,
    rows_of,
    runs_of,
    sentence,
    state_of,
)
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.filters import number
from controlplane.resources.tables import Table
from controlplane.resources.what_ifs import WHAT_IFS
from controlplane.simulation.whatif import plan, selectors, services, twin_errors
from controlplane.simulation.whatif.changes.questions import QUESTIONS
from controlplane.simulation.whatif.models import LETTERS, WhatIf, WhatIfState
from controlplane.simulation.whatif.working import OPEN
from scheduling.simulation.measures.comparison import Verdict

MISSING: Final = (WhatIfState.CANCELLED, WhatIfState.FAILED)


@require_safe
@fleet_role(Role.VIEWER)
def what_ifs(request: HttpRequest) -> HttpResponseBase:
    def shown(rows: list[Any]) -> list[dict[str, Any]]:
        return [
            {
                "row": row,
                "verdict": state_of(row.state),
                "letters": LETTERS[: row.futures_count],
                "share": row.runs_done / row.runs_count if row.state in OPEN and row.runs_count else None,
            }
            for row in rows
        ]

    is_open = WhatIf.objects.filter(state__in=OPEN).exists()
    judged = [(model, gpu, band) for (model, gpu), band in twin_errors.twin_errors().items()]
    return list_page(request, WHAT_IFS, shown, questions=QUESTIONS.items(), is_open=is_open, judged=judged)


@require_safe
@fleet_role(Role.VIEWER)
def what_if(request: HttpRequest, pk: int) -> HttpResponseBase:
    """Show the comparison; the address says which class and which future."""
    row = get_object_or_404(WhatIf, pk=pk)
    seen = _ComparisonPage(request, row)
    if not seen.rows:
        raise Http404(f"What-if {pk} has no futures.")
    if request.GET.get("format") == "csv":
        for chart in seen.charts():
            if chart.key == request.GET.get("table"):
                return chart.csv(f"what-if-{pk}-{chart.key}")
        return Table(selectors.FUTURES_HEADER, map(list, selectors.futures(row, seen.slo_class))).csv(f"what-if-{pk}")
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
    match action:
        case "cancel":
            services.cancel(row, form.user)
            return "Cancelled; finished runs stay."
        case "resume":
            services.resume(row, form.user)
            return "The missing runs continue."
        case "add-seeds":
            services.add_seeds(row, number(form.fields.get("count", "")) or plan.MORE_SEEDS, form.user)
            return "More repetitions run."
        case "delete":
            services.delete(row, form.user)
            return f"“{row}” is deleted."
        case "plan":
            letter, anyway = form.fields.get("future", ""), form.fields.get("anyway") == "yes"
            plan.make_plan(row, letter, form.user, form.reason, anyway=anyway)
            return f"Future {letter} is now the plan. The event has what was before."
    raise ActionError(f"There is no action {action!r}.")


class _ComparisonPage:
    """One what-if as an address shows it."""

    def __init__(self, request: HttpRequest, row: WhatIf) -> None:
        self.row, self.asked, self.user = row, request.GET, user_of(request)
        self.progress: dict[str, Any] = selectors.progress(row.pk) or {}
        asked = self.asked.get("class", "")
        self.compared = selectors.comparison(row, asked if asked in selectors.targets_of(row) else "")
        self.slo_class: str = self.compared["slo_class"]
        self.rows = rows_of(self.compared, self.progress)

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the future of the address; else the plan, the cheapest that keeps its promises, or the last."""
        wanted = self.asked.get("future") or self.row.plan.get("letter", "")
        cheapest = [row for row in self.rows if row["verdict"].text == Verdict.CHEAPEST]
        named = [row for row in self.rows if row["letter"] == wanted]
        return (named or cheapest or self.rows)[0 if named or cheapest else -1]

    def charts(self) -> list[Chart]:
        row, whose = self.row, "all classes" if self.compared["target"] is None else self.slo_class
        at = timezone.localtime(datetime.fromisoformat(row.start["at"]) if row.start else row.created_at)
        return [
            drawn.cost(self.rows, whose, self.compared["target"]),
            drawn.latency(self.rows, selectors.curves(row), self.slo_class, at),
        ]

    def context(self) -> dict[str, Any]:
        row, chosen = self.row, self.chosen
        cost, latency = self.charts()
        return {
            **live_context(feed.state(), f"what-if:{row.pk}"),
            "what_if": row,
            "began": timezone.localtime(datetime.fromisoformat(row.start["at"])) if row.start else None,
            "remarks": row.start.get("remarks", []),
            "edits": selectors.edits_in_words(row),
            "run": self._run(),
            "futures": self.rows,
            "compared": self.compared,
            "runs": runs_of(self.rows),
            "chosen": chosen | {"sentence": sentence(chosen, self.compared)} | plan.review(row, chosen, self.user),
            "cost": cost,
            "latency": latency,
            "more_seeds": plan.more_of(self.rows),
        }

    def _run(self) -> dict[str, Any]:
        done, row = self.progress, self.row
        whole = sum(each["whole"] for each in self.rows)
        failed = sum(each["state"] == WhatIfState.FAILED for each in self.rows)
        texts = {
            WhatIfState.RUNNING: f", {whole} of {len(self.rows)} futures done",
            WhatIfState.CANCELLED: f" by {row.ended_by}, {whole} of {len(self.rows)} futures kept" * bool(row.ended_by),
            WhatIfState.DONE: f", {failed} of {len(self.rows)} futures failed" * bool(failed),
        }
        return {
            "verdict": state_of(row.state, texts.get(WhatIfState(row.state), ""), failed=failed > 0),
            "text": in_words(done, kernels.progress() if row.state in OPEN else None),
            "open": row.state in OPEN,
            "missing": row.state not in OPEN and any(each["state"] in MISSING for each in done["futures"]),
            "share": done["done"] if row.state in OPEN else None,
        }
