"""What-if pages: the list, the comparison of one what-if's futures, and their decisions."""

from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from django.db.models import Count
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET, require_safe

from controlplane import kernels
from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.charts.spec import Chart
from controlplane.console.formats import NONE, milliseconds, percent_fine, points_signed, signed
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.plans.cards import cards_of
from controlplane.console.pages.what_if import charts as drawn
from controlplane.console.pages.what_if.compare import (
    facts,
    heat,
    hidden_of,
    in_words,
    rows_of,
    runs_of,
    sentence,
    state_of,
)
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment
from controlplane.planning.models import ScalingPlan
from controlplane.resources.filters import number
from controlplane.resources.names import place_titles
from controlplane.resources.tables import Table
from controlplane.simulation.whatif import plan, selectors, services, twin_errors
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.models import LETTERS, Future, WhatIf, WhatIfState
from controlplane.simulation.whatif.plan import followed, ready_since
from controlplane.simulation.whatif.results import DecisionPairs, compared, kept_of
from controlplane.simulation.whatif.working import OPEN, edited_time

SHOWN: Final = 100
MORE_SEEDS: Final = 5
LEAST_SHOWN: Final = 2
"""Futures that cannot be hidden: A and one other."""
READY: Final = (
    ("What if demand doubles?", "demand-edit=factor&demand-by=2&chosen=yes&preset=pilothouse&preset=qlm"),
    ("What if a region is lost?", "failure-what=region&failure-region={region}&failure-at=10&failure-for=20&fleet-for=all"),
    ("Is another policy cheaper?", "chosen=yes&preset=pilothouse&preset=preserve&preset=sageserve-lt-ua&preset=qlm"),
)  # fmt: skip
MISSING: Final = (WhatIfState.CANCELLED, WhatIfState.FAILED, WhatIfState.INTERRUPTED)


@require_safe
@fleet_role(Role.VIEWER)
def what_ifs(request: HttpRequest) -> HttpResponse:
    rows: list[Any] = list(selectors.what_ifs()[:SHOWN])
    context = {
        "rows": [(row, state_of(row.state), LETTERS[: row.futures_count], _share(row)) for row in rows],
        "ready": ready_questions(),
        "any_open": any(row.state in OPEN for row in rows),
        "any_draft": any(row.state == WhatIfState.DRAFT for row in rows),
        "twin": _twin(),
    }
    return render(request, "console/what_if/list.html", context)


def ready_questions() -> list[tuple[str, str]]:
    """Return questions with the forms that they fill in; the region that is lost is the one with most deployments."""
    active = Deployment.objects.filter(active=True, region__active=True).order_by()
    most = active.values("region__name").annotate(count=Count("pk")).order_by("-count", "region__name").first()
    return [
        (label, query.format(region=most["region__name"] if most else ""))
        for label, query in READY
        if most or "{region}" not in query
    ]


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
    if row.state == WhatIfState.DRAFT and row.asked:
        return redirect(f"{row.asked}&draft={row.pk}")
    seen = _ComparisonPage(request, row)
    match request.GET.get("format"), request.GET.get("table"):
        case "csv", "regret":
            return _regret_table(seen).csv(f"what-if-{pk}-regret")
        case "csv", "futures":
            return Table(selectors.FUTURES_HEADER, map(list, selectors.futures(row, seen.scope))).csv(f"what-if-{pk}")
        case "csv", "runs":
            return Table(selectors.RUNS_HEADER, map(list, selectors.runs(row))).csv(f"what-if-{pk}-runs")
        case "csv", "keys":
            return Table(selectors.KEYS_HEADER, map(list, selectors.keys(row))).csv(f"what-if-{pk}-keys")
        case "csv", key:
            for chart in seen.charts():
                if chart.key == key:
                    return chart.csv(f"what-if-{pk}-{key}")
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
    """Carry out *action* on a what-if, or on its future `future`; the plan of a future alone keeps a reason."""
    user, letter = form.user, form.fields.get("future", "")
    match action:
        case "cancel":
            services.cancel(row, user, letter=letter)
            return f"{letter or 'All'} cancelled; finished runs stay."
        case "resume":
            services.resume(row, user, letter=letter)
            return "The missing runs continue."
        case "add-seeds":
            services.add_seeds(row, number(form.fields.get("count", "")) or MORE_SEEDS, user)
            return "More seeds run."
        case "run":
            services.submit(row, user)
            return "It runs."
        case "delete":
            services.delete(row, user)
            return f"“{row}” is deleted."
        case "plan":
            plan.make_plan(row, letter, user, form.reason, confirmed=bool(form.fields.get("confirmed")))
            return f"Future {letter} is now the plan."
        case "undo":
            plan.undo(row, user)
            return "The plan was undone: policies and bounds are as before, its proposals are rejected."
    raise ActionError(f"There is no action {action!r}.")


class _ComparisonPage:
    """One what-if as an address shows it."""

    def __init__(self, request: HttpRequest, row: WhatIf) -> None:
        self.row, self.asked = row, request.GET
        self.scope = self._one("scope", ("all", "interactive", "all, edited", "interactive, edited"))
        self.quantity = self._one("quantity", [name for name, _ in drawn.QUANTITIES])
        self.against = self._one("against", [name for name, _ in drawn.AGAINST])
        self.price = _price(self.asked.get("price", ""))
        self.progress: dict[str, Any] = selectors.progress(row.pk) or {}
        self.compared = selectors.comparison(row, self.scope, self.price)
        self.every = rows_of(self.compared, self.progress)
        self.hidden = hidden_of(self.asked.get("hide", ""), self.every)
        self.rows = [each for each in self.every if each["letter"] not in self.hidden]
        self.curves = selectors.curves(row, self.scope)
        values = row.start.get("scenario", {})
        self.regions = [("", "All"), *((name, region_title(name)) for name in values.get("regions", {}))]
        self.region = self._one("region", [name for name, _ in self.regions])
        self.edited_s = edited_time(row)

    def _one(self, name: str, names: Any) -> str:
        given = self.asked.get(name, "")
        return given if given in names else next(iter(names))

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the future of the address; else the chosen one, the cheapest that holds, or the last."""
        wanted = self.asked.get("future") or (self.row.chosen.letter if self.row.chosen else "")
        cheapest = [row for row in self.rows if row["verdict"].text == "Meets it, cheapest"]
        named = [row for row in self.rows if row["letter"] == wanted]
        return (named or cheapest or self.rows)[0 if named or cheapest else -1]

    def _without(self, letter: str) -> str:
        """Return the value of the address that hides *letter* too; empty where it has to stay."""
        asked = ",".join(sorted([*self.hidden, letter]))
        return asked if letter in hidden_of(asked, self.every) and len(self.rows) > LEAST_SHOWN else ""

    def charts(self) -> list[Chart]:
        row = self.row
        at = timezone.localtime(datetime.fromisoformat(row.start["at"]) if row.start else row.created_at)
        self.scatter = drawn.scatter(self.rows, self.compared["target"], self.against)
        self.ttft = drawn.ttft(self.rows, self.curves, self._slo_ms(), self.scope)
        actual = {}
        if self.quantity == "ready" and row.plan and not row.plan.get("undone_at"):
            actual = {row.plan["letter"]: ready_since(row, self.region)}
        self.over = drawn.over_time(
            self.rows, self.curves, self.quantity, self.region, at, edited_s=self.edited_s, actual=actual
        )
        return [self.scatter, self.ttft, *self.over]

    def _slo_ms(self) -> float | None:
        classes = self.row.start.get("scenario", {}).get("classes", {}).values()
        return min((each["ttft_ms"] for each in classes if each.get("ttft_ms")), default=None)

    def context(self) -> dict[str, Any]:
        row, chosen = self.row, self.chosen
        self.charts()
        edits = selectors.edits_in_words(row)
        known = [each["requests"]["mean"] for each in self.compared["futures"] if each["requests"]]
        regret = self.compared["regret"]
        names = {each["letter"]: each["name"] for each in self.every}
        return {
            **live_context(feed.state(), f"what-if:{row.pk}"),
            "what_if": row,
            "run": self._run(facts(row, edits, known[0] if known else None, "Every future sees the same requests")),
            "remarks": row.start.get("remarks", [])[1:],
            "stale": self._stale(),
            "futures": self.every,
            "shown": [each | {"hide": self._without(each["letter"])} for each in self.rows],
            "at_door": [(each, of) for each in self.rows for of in each["at_door"] or ()],
            "rules": [
                (each, of, 1 - of["missed"] / of["judged"] if of["judged"] else None)
                for each in self.rows
                for of in each["rules"] or ()
            ],
            "runs": runs_of(self.rows),
            "hidden": [
                each | {"show": ",".join(other for other in self.hidden if other != each["letter"]) or None}
                for each in self.every
                if each["letter"] in self.hidden
            ],
            "chosen": chosen | {"sentence": sentence(chosen, row.slo_target)} | self._choice(chosen),
            "plan_made": plan_made(row),
            "followed": following(row),
            "scopes": self._scopes(),
            "charts": {
                "scatter": self.scatter,
                "ttft": self.ttft,
                "over_time": self.over,
                "edited": self.edited_s is not None,
            },
            "over_time_title": f"{dict(drawn.QUANTITIES)[self.quantity]} over time",
            "quantities": drawn.QUANTITIES,
            "against": self.against,
            "gains": drawn.AGAINST,
            "quantity": self.quantity,
            "regions": self.regions,
            "region": self.region,
            "decides": self._decides(),
            "kept_futures": row.futures.filter(letter__in=kept_of(row)),
            "regret": regret
            and {"rows": heat(regret, names), "seeds": regret["seeds"], "sentence": regret["sentence"]},
            "price": self.price if self.price is not None else row.usd_per_1000_missed,
            "kept_fields": [(name, value) for name, value in self.asked.items() if name not in ("price", "format")],
            "more_seeds": MORE_SEEDS,
            "copy_address": row.asked,
        }

    def _run(self, about: list[tuple[str, str, str]]) -> dict[str, Any]:
        done = self.progress
        row = self.row
        whole = sum(each["whole"] for each in self.every)
        failed = sum(each["state"] == WhatIfState.FAILED for each in self.every)
        texts = {
            WhatIfState.RUNNING: f", {whole} of {len(self.every)} futures done",
            WhatIfState.CANCELLED: f" by {row.ended_by}, {whole} of {len(self.every)} futures kept"
            if row.ended_by
            else "",
            WhatIfState.DONE: f", {failed} of {len(self.every)} futures failed" if failed else "",
        }
        return {
            "verdict": state_of(row.state, texts.get(WhatIfState(row.state), ""), failed=failed > 0),
            "text": in_words(done, kernels.progress() if row.state in OPEN else None),
            "open": row.state in OPEN,
            "missing": row.state not in OPEN and any(each["state"] in MISSING for each in done["futures"]),
            "share": done["done"] if row.state in OPEN else None,
            "facts": about,
        }

    def _stale(self) -> list[str]:
        """Describe differences from the start, while they matter."""
        row = self.row
        if row.start.get("kind") != "fleet" or row.plan or row.state == WhatIfState.DRAFT:
            return []
        began = datetime.fromisoformat(row.start["at"])
        if timezone.now() - began > timedelta(seconds=row.horizon_s):
            return [
                f"The time asked about is over, since {timezone.localtime(began + timedelta(seconds=row.horizon_s)):%H:%M}."
            ]
        return plan.changed_since(row)

    def _choice(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """Return the changes of the fleet that the chosen future needs, and whether it can become the plan."""
        row = self.row
        future = row.futures.get(letter=chosen["letter"])
        keys = selectors.full_diff(row, future)
        if why := _why_not(row, chosen):
            becomes = [(f"{at}.", text) for at, text in enumerate(chosen["words"], 1)]
            return {"becomes": becomes, "why_not": why, "keys": keys}
        try:
            wanted, gone = plan.wanted(row, future), plan.obstacles(row, future)
        except ActionError as refusal:
            return {"becomes": [], "why_not": str(refusal), "keys": keys}
        changes = [text for text in chosen["words"] if text not in wanted.assumed]
        becomes = [("Changes", text) for text in changes] + [
            ("Assumed", text) for text in (*wanted.assumed, *selectors.edits_in_words(row))
        ]
        becomes.append(("Instances", "proposed as plans, which an operator approves"))
        misses = plan.misses_target(row, future.letter)
        return {
            "becomes": becomes, "can_become": not gone, "why_not": "; ".join(gone), "keys": keys, "misses": misses,
        }  # fmt: skip

    def _scopes(self) -> list[list[tuple[str, str, bool]]]:
        part = ", edited" if self.scope.endswith(", edited") else ""
        kind = self.scope.removesuffix(", edited")
        times = [(kind, "All of it", not part)]
        if self.edited_s is not None:
            times.append((f"{kind}, edited", "Edited time only", bool(part)))
        classes = [("all", "All classes"), ("interactive", "Interactive")]
        return [times, [(f"{name}{part}", label, name == kind) for name, label in classes]]

    def _decides(self) -> list[dict[str, Any]]:
        began = datetime.fromisoformat(self.row.start["at"]) if self.row.start else self.row.created_at
        shown, kept = [], kept_of(self.row)
        for each in selectors.decides(self.row):
            if each["letter"] in self.hidden:
                continue
            at = timezone.localtime(began + timedelta(seconds=each["at_s"]))
            better = (each["slo_met"] or 0.0) - 1e-3 * each["waiting"]
            tone = "ok" if better > 1e-3 else "crit" if better < -1e-3 else ""
            of = {"at": LETTERS.index(each["letter"]), "kept": each["letter"] in kept}
            shown.append(each | of | {"clock": f"{at:%H:%M}", "tone": tone})
        return shown


def _price(text: str) -> float | None:
    """Return dollars, 0 or more; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def _why_not(row: WhatIf, chosen: dict[str, Any]) -> str:
    if row.start.get("kind") != "fleet":
        return "Only a what-if that began from the live fleet can become a plan."
    if not chosen["words"]:
        return "As now needs no plan."
    return "" if chosen["whole"] else "It can become the plan once all its seeds are done."


def _regret_table(seen: _ComparisonPage) -> Table:
    regret = seen.compared["regret"]
    if regret is None:
        return Table(("Future",), [])
    header = ("Future", *(f"Seed {seed} ($)" for seed in regret["seeds"]), "Mean ($)", "Worst ($)")
    return Table(header, [[each["letter"], *each["usd"], each["mean"], each["worst"]] for each in regret["rows"]])


def plan_made(row: WhatIf) -> str:
    """Describe who made which future the plan, and whether it still is; empty if none ever was."""
    if not row.plan:
        return ""
    at = timezone.localtime(datetime.fromisoformat(row.plan["at"]))
    if back := row.plan.get("undone_at"):
        return f"It was the plan from {at:%d %b %H:%M} until {timezone.localtime(datetime.fromisoformat(back)):%d %b %H:%M}."
    return f"{row.plan['letter']} is the plan since {at:%d %b %H:%M}, by {row.plan['by']}: {row.plan['note']}"


def following(row: WhatIf) -> dict[str, Any] | None:
    """Return prediction and measurement of the plan; None if no future of *row* is the plan."""
    came = followed(row)
    if came is None:
        return None
    titles, now = place_titles(), timezone.now()
    plans = ScalingPlan.objects.filter(pk__in=row.plan["plans"]).select_related("model").order_by("model__name")
    cards = cards_of(plans, titles, now)
    return {
        "letter": row.plan["letter"],
        "name": row.plan["name"],
        "at": LETTERS.index(row.plan["letter"]),
        "made": plan_made(row),
        "over": came["over"],
        "assumed": came["assumed"],
        "cards": [{"card": card, "plan": card.plan} for card in cards],
        "waiting": sum(card.decidable and not card.expired for card in cards),
        "measures": [
            ("Requests", f"{came['requests']:,}", "since it is the plan"),
            ("SLO met", percent_fine(came["slo_met"]), _predicted(percent_fine(came["predicted_slo_met"]))),
            ("TTFT p95", milliseconds(came["ttft_p95_ms"]), _predicted(milliseconds(came["predicted_ttft_p95_ms"]))),
            _instances(came["instances"]),
        ],
        "endpoints": [_endpoint(each, titles) for each in came["instances"]],
    }


@require_safe
@fleet_role(Role.VIEWER)
def panel(request: HttpRequest, pk: int) -> HttpResponse:
    """Show the panel that follows the plan, for a page with the same query; empty once none is the plan."""
    row = get_object_or_404(WhatIf, pk=pk)
    came = following(row)
    if came is None:
        return HttpResponse()
    page = f"{reverse('console:what-if', args=[pk])}?{request.GET.urlencode()}"
    return render(request, "console/what_if/followed.html", {"followed": came, "what_if": row, "page_address": page})


def _predicted(text: str) -> str:
    return "not comparable" if text == NONE else f"predicted {text} over all of it"


def _instances(endpoints: list[dict[str, Any]]) -> tuple[str, str, str]:
    ready = sum(each["ready"] for each in endpoints)
    if any(each["predicted"] is None for each in endpoints):
        return "Ready instances", f"{ready}", "not comparable"
    return "Ready instances", f"{ready}", f"predicted {sum(each['predicted'] for each in endpoints):.1f} for now"


def _endpoint(each: dict[str, Any], titles: dict[str, str]) -> dict[str, Any]:
    """Return instances of a model in a region: ready at the fork, predicted for now, and present."""
    # Predictions are means over seeds: a difference below a half is none.
    known = each["predicted"] is not None
    more = round(each["ready"] - each["predicted"]) if known else 0
    moving = [f"{each[name]} {name}" for name in ("starting", "draining") if each[name]]
    return {
        "model": each["model"],
        "region": titles.get(each["region"], each["region"]),
        "began": f"{round(each['began']):d}",
        "predicted": f"{round(each['predicted'], 1):g}" if known else NONE,
        "ready": each["ready"],
        "moving": ", ".join(moving),
        "difference": f"{signed(more)} against predicted" if more else "as predicted" if known else "not comparable",
        "agrees": not more,
    }


KINDS: Final = {
    "instances": ("Instances", "Instances added and taken away, and swaps, with their reasons"),
    "swap": ("Swaps", "Instances added and taken away, and swaps, with their reasons"),
    "region": ("Region", "Requests in order of arrival: who serves each, after which wait"),
    "instance": ("Instance", "Requests in order of arrival: who serves each, after which wait"),
    "order": ("Order", "Requests that waited, in the order in which each begins them"),
}
"""Of decisions: a word, and what the rows are."""


@require_safe
@fleet_role(Role.VIEWER)
def decisions(request: HttpRequest, pk: int, letter: str) -> HttpResponseBase:
    """Show `/what-if/12/decisions/B/?kind=order&region=us-east`: one kind in one region, by default the first."""
    row = get_object_or_404(WhatIf.objects.defer("start"), pk=pk)
    future = get_object_or_404(row.futures, letter=letter)
    known = compared(row, letter)
    about = {(each["kind"], each["region"]): each for each in future.decides}
    keys = [key for key in about if key in known]
    asked = request.GET.get("kind", ""), request.GET.get("region", "")
    key = asked if asked in keys else keys[0] if keys else None
    at = began(row)
    if key is not None and request.GET.get("format") == "csv":
        return _table(future, known[key], at).csv(f"what-if-{pk}-{letter}-{'-'.join(key)}")
    context = {
        "what_if": row,
        "future": future,
        "at": LETTERS.index(letter),
        "choices": _choices(keys, key),
        "shown": _shown(known[key], at, key, about[key]) if key else None,
    }
    if key is not None:
        ordered = sorted(keys, key=_place)
        place = ordered.index(key)
        context |= {
            "before": _query(ordered[place - 1]) if place else "",
            "after": _query(ordered[place + 1]) if place + 1 < len(ordered) else "",
        }
    return render(request, "console/what_if/decisions.html", context)


def began(row: WhatIf) -> datetime:
    """Return the start of the simulated time."""
    at = WhatIf.objects.filter(pk=row.pk).values_list("start__at", flat=True).first()
    return timezone.localtime(datetime.fromisoformat(at) if at else row.created_at)


def _place(key: tuple[str, str]) -> tuple[str, int]:
    kind, region = key
    return region, list(KINDS).index(kind)


def _query(key: tuple[str, str]) -> str:
    return f"?kind={key[0]}&region={key[1]}"


def _choices(keys: list[tuple[str, str]], chosen: tuple[str, str] | None) -> list[tuple[str, Any]]:
    """Return by region the address, kind and selection of each difference."""
    return [
        (region_title(region), [(_query(each), KINDS[each[0]][0], each == chosen) for each in own])
        for region, own in groupby(sorted(keys, key=_place), key=itemgetter(1))
    ]


def _shown(known: DecisionPairs, at: datetime, key: tuple[str, str], about: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": f"{region_title(key[1])}: {KINDS[key[0]][0].lower()}",
        "caption": KINDS[key[0]][1],
        "sentence": about["sentence"],
        "effect": about["effect"],
        "rows": [
            {
                "clock": f"{at + timedelta(seconds=each.at_s):%H:%M:%S}",
                "about": each.about,
                "first": each.first,
                "other": each.other,
                "differs": each.differs,
                "marked": place == known.marked,
            }
            for place, each in enumerate(known.rows)
        ],
    }


def _table(future: Future, known: DecisionPairs, at: datetime) -> Table:
    header = ("Time (UTC)", "After the start (s)", "Model", "A", str(future), "Differs", "First difference")
    rows = [
        [
            at + timedelta(seconds=each.at_s),
            round(each.at_s, 3),
            each.about,
            each.first,
            each.other,
            each.differs,
            place == known.marked,
        ]
        for place, each in enumerate(known.rows)
    ]
    return Table(header, rows)
