"""The chart of usage: what was used by day or hour, stacked by what the table is grouped by."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from controlplane.console.charts.spec import AMOUNT, COUNT, DAYS, STYLES, Axis, Chart, Series, local
from controlplane.console.formats import count, quantity, usd
from controlplane.console.pages.usage.tables import GROUPS, IDLE, name_of, with_hours
from controlplane.usage.selectors import UsageScope, usage

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
OTHERS, USED = "Others", "Used"
NAMED = len(STYLES) - 1  # with their own series; the rest is one
IDLE_STYLE = ("border-strong", "solid")


@dataclass(frozen=True, slots=True)
class Shown:
    """What bars are high by: a sum of `usage`, its title and unit."""

    field: str
    title: str
    unit: str
    axis: Axis

    def text(self, value: float) -> str:
        return usd(value) if self.unit == "USD" else f"{quantity(value)} {self.unit}"


HOURS = DAYS.but(nticks=8, tickformatstops=None, tickformat="%H:%M\n%a %d %b")
DOLLARS = Axis({"tickprefix": "$", "tickformat": ",~r", "hoverformat": ",.2f"}, "USD")
SHOWN = {
    "cost": Shown("cost_usd", "Cost", "USD", DOLLARS),
    "charged": Shown("charged_usd", "Price", "USD", DOLLARS),
    "tokens": Shown("tokens", "Tokens", "tokens", AMOUNT.but(unit="tokens", hoverformat=",d")),
    "gpu": Shown(
        "gpu_hours", "GPU-hours", "GPU-hours", COUNT.but(unit="GPU-hours", tickformat=",~r", hoverformat=",.1f")
    ),
}


def usage_over_time(asked: UsageScope, group: str, shown: Shown, by_hour: bool) -> Chart:
    """Bars of each day, or hour, of *asked*; the greatest of *group* have their own series."""
    step, of = (HOUR, "hour") if by_hour else (DAY, "day")
    sums: dict[str, dict[datetime, float]] = defaultdict(lambda: defaultdict(int))
    grouped = GROUPS[group].of if group != "day" else ()
    for row in map(with_hours, usage(asked, (of, *grouped))):
        name = IDLE if row["idle"] else name_of(row, group) if grouped else USED
        sums[name][row[of]] += row[shown.field]
    total = {name: sum(values.values()) for name, values in sums.items()}
    names = sorted((name for name in sums if name != IDLE and total[name]), key=lambda name: (-total[name], name))
    x = _steps(asked, step)
    bars = [
        _bar(name, [sums[name].get(at, 0) for at in x], style, step)
        for name, style in zip(names[:NAMED], STYLES, strict=False)
    ]
    if rest := names[NAMED:]:
        bars.append(_bar(OTHERS, [sum(sums[name].get(at, 0) for name in rest) for at in x], STYLES[-1], step))
    if total.get(IDLE):
        bars.append(_bar(IDLE, [sums[IDLE].get(at, 0) for at in x], IDLE_STYLE, step))
    whole = sum(total.values())
    # else plotly begins at noon, with the name of the day before
    every_ms = DAY.total_seconds() * 1000 * -(-len(x) // 8)
    days = DAYS.but(ticklabelmode="period", tick0=local(asked.since), dtick=every_ms)
    across = HOURS if by_hour else days
    first = f"; {names[0]} has the most, {shown.text(total[names[0]])}" if names and group != "day" else ""
    return Chart(
        key="usage",
        title=f"{shown.title} by {of}",
        caption=f"In {shown.unit}, {of}s in {asked.zone}" + ("" if group == "day" else f", by {GROUPS[group].title}"),
        sentence=f"{shown.title}: {shown.text(whole)} in {count(len(x))} {of}s{first}.",
        x=[at.astimezone(asked.zone) for at in x],
        across=across.but(heading=of.capitalize(), range=[local(asked.since), local(asked.until)]),
        up=shown.axis,
        series=bars,
        empty="" if whole else "Nothing was used in this period.",
        size="medium",
    )


def _bar(name: str, values: Sequence[float], style: tuple[str, str], step: timedelta) -> Series:
    """Bars that fill their *step*, on top of those before them; what is idle is hatched."""
    marker = {"color": f"var(--{style[0]})", "line": {"width": 0}}
    if name == IDLE:
        marker |= {"pattern": {"shape": "/", "size": 6, "solidity": 0.2}}
    more = {"type": "bar", "mode": None, "marker": marker, "xperiod": step.total_seconds() * 1000}
    return Series(name, [round(value, 6) for value in values], style, shape="square", more=more)


def _steps(asked: UsageScope, step: timedelta) -> list[datetime]:
    # days by the clock, hours as time passes
    since, until = (at.astimezone(UTC) if step == HOUR else at for at in (asked.since, asked.until))
    return [since + number * step for number in range(-(-(until - since) // step))]
