"""The decisions of A and of another future side by side, around the first that differs."""

from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.resources.tables import Table
from controlplane.simulation.whatif.changes.base import region_title
from controlplane.simulation.whatif.models import LETTERS, Future, WhatIf
from controlplane.simulation.whatif.runs.decisions import Compared, compared

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
    """`/what-if/12/decisions/B/?kind=order&region=us-east`: of one kind in one region; the first there is, without them."""
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
    """When the time that is simulated begins."""
    at = WhatIf.objects.filter(pk=row.pk).values_list("start__at", flat=True).first()
    return timezone.localtime(datetime.fromisoformat(at) if at else row.created_at)


def _place(key: tuple[str, str]) -> tuple[str, int]:
    kind, region = key
    return region, list(KINDS).index(kind)


def _query(key: tuple[str, str]) -> str:
    return f"?kind={key[0]}&region={key[1]}"


def _choices(keys: list[tuple[str, str]], chosen: tuple[str, str] | None) -> list[tuple[str, Any]]:
    """By region, (address, kind, whether it is shown) of each difference."""
    return [
        (region_title(region), [(_query(each), KINDS[each[0]][0], each == chosen) for each in own])
        for region, own in groupby(sorted(keys, key=_place), key=itemgetter(1))
    ]


def _shown(known: Compared, at: datetime, key: tuple[str, str], about: dict[str, Any]) -> dict[str, Any]:
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


def _table(future: Future, known: Compared, at: datetime) -> Table:
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
