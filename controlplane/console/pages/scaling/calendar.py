"""The calendar: what is asked for, expected, planned, scheduled and under maintenance, a week back and a week ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.utils import timezone

from controlplane.console.charts.cache import once
from controlplane.console.charts.demand import demand_chart
from controlplane.console.charts.spec import Chart, Series, axis_title, local
from controlplane.console.formats import signed
from controlplane.fleet.models import Node
from controlplane.fleet.selectors import maintenance_windows, scheduled_minimums
from controlplane.planning.history import entries
from controlplane.planning.outlook import see
from controlplane.planning.selectors import LIVING_PLANS
from scheduling.scaling.schedule import clock_changes

DAYS: Final = 7
EVERY_S = 60
LANES = {"Maintenance": "s5", "Plans": "s4", "Scheduled minimums": "s3"}  # from the bottom, and their colours
Window = tuple[datetime, datetime]


@dataclass(frozen=True, slots=True)
class Item:
    """What lies on one of the calendar's lanes, at each of its *windows*."""

    lane: str
    title: str
    about: str
    windows: Sequence[Window]
    row: Any = None


def items(model: str, region: str, now: datetime) -> list[Item]:
    """Return what is scheduled, planned and under maintenance for *model* in *region* (empty: all) within the axis."""
    since, until = now - timedelta(days=DAYS), now + timedelta(days=DAYS)
    made = []
    for row in scheduled_minimums():
        if model in ("", row.model.name) and (not region or row.region is None or row.region.name == region):
            rule = row.rule
            within = [
                (_moment(begin), _moment(end)) for begin, end in rule.windows(since.timestamp(), until.timestamp())
            ]
            about = f"at least {row.instances} in {row.region.title if row.region else 'each region'}, by {rule.zone}"
            made.append(Item("Scheduled minimums", f"{row.name}: {row.model}", about, within, row))
    for each in entries(model, since):
        if each.plan and (not region or any(target["region"] == region for target in each.plan.targets)):
            ends = each.plan.valid_until if each.plan.status in LIVING_PLANS else each.at
            change = " ".join(signed(by) for by in (each.more, each.less) if by)
            about = f"{each.plan.get_status_display()}, {change or 'no change'}"
            made.append(Item("Plans", f"Plan {each.plan.pk}: {each.model}", about, [(each.since, max(each.at, ends))]))
    for window in maintenance_windows(since, until):
        place = window.place
        if not region or (place.region.name if isinstance(place, Node) else place.name) == region:
            about = f"{window.state.label}: {window.reason}"
            made.append(Item("Maintenance", str(place), about, [(window.from_at, window.ends_at)]))
    return made


def _moment(at_s: float) -> datetime:
    return datetime.fromtimestamp(at_s, UTC)


def chart(model: str, region: str, title: str, lying: Iterable[Item], now: datetime) -> Chart:
    """Return the chart of demand, forecast and capacity over the axis in the present time zone, with lanes below it."""
    week, hours = timedelta(days=DAYS), 24 * DAYS
    key = ("calendar", model, region, int(now.timestamp()) // EVERY_S)
    outlook = once(key, lambda: see(model, region, hours, now, hours))
    drawn = demand_chart(outlook, model, title, "calendar")
    lanes = [_lane(name, color, [each for each in lying if each.lane == name]) for name, color in LANES.items()]
    zone, ends = timezone.get_current_timezone_name(), (now - week, now + week)
    changes = [
        (timezone.localtime(_moment(at_s)), f"Clocks go {'forward' if by_s > 0 else 'back'} {abs(by_s) / 3600:g} h")
        for at_s, by_s in clock_changes(zone, *(end.timestamp() for end in ends))
    ]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "var(--warn)", "dash": "4px,3px"}}
    word = {"y": 1, "yref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "top"}
    return replace(
        drawn,
        key="calendar",
        title="A week back and a week ahead",
        caption=f"{drawn.caption}; times in {zone}",
        sentence=" ".join([drawn.sentence, *(f"{text} on {at:%d %b}." for at, text in changes)]),
        series=[*drawn.series, *lanes] if not drawn.empty else drawn.series,
        across=drawn.across.but(range=[local(timezone.localtime(end)) for end in ends], nticks=15, tickangle=None),
        shapes=[line | {"x0": local(at), "x1": local(at)} for at, _ in changes],
        layout={
            "annotations": [word | {"x": local(at), "text": text} for at, text in changes],
            "xaxis": {"anchor": "y2"},
            "yaxis": {"domain": [0.28, 1.0], "title": axis_title("tok/s")},
            "yaxis2": {"domain": [0.0, 0.22], "categoryarray": list(LANES), "type": "category", "fixedrange": True,
                       "automargin": True, "range": [-0.6, len(LANES) - 0.4], "gridcolor": "var(--grid)"},
        },
    )  # fmt: skip


def _lane(name: str, color: str, lying: Sequence[Item]) -> Series:
    """Return a bar for each window of the items of one lane: a thick line with gaps."""
    windows = [(window, f"{each.title}, {each.about}") for each in lying for window in each.windows]
    x = [at for window, _ in windows for at in (*map(timezone.localtime, window), None)]
    words = [text for _, about in windows for text in (about, about, None)]
    more = {"yaxis": "y2", "text": words, "hovertemplate": "%{text}<extra></extra>", "connectgaps": False}
    y: Any = [None if at is None else name for at in x]  # categories
    return Series(name, y, (color, "solid"), x, 9, listed=False, more=more)
