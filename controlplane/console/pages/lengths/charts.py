"""Chart of the errors of predicted output lengths over time."""

from django.utils import timezone

from controlplane.console.charts.spec import AMOUNT, DAYS, STYLES, Chart, Series, last, styles
from controlplane.console.formats import quantity
from controlplane.lengths import selectors
from controlplane.lengths.selectors import CACHE, PRIOR, SHADOW

NO_MEASURES = "No request with a predicted length ended in this range."


def source_order(name: str) -> tuple[int, str]:
    """The cache first, then versions, then the prior; shadows last."""
    if name.startswith(SHADOW):
        return 4, name
    return {CACHE: 0, PRIOR: 4}.get(name, 3), name


def error_over_time(errors: selectors.Series) -> Chart:
    """Return the mean absolute error of the busiest predictors over time."""
    busiest = sorted(sorted(errors.lines, key=source_order), key=lambda n: -sum(w.requests for w in errors.lines[n]))
    named = styles(sorted(busiest[: len(STYLES)], key=source_order))
    series = [
        Series(
            name,
            [window.mae for window in errors.lines[name]],
            style,
            width=2,
            size=4,
            more={"hovertemplate": "%{y:,.0f} tokens"},
        )
        for name, style in named.items()
    ]
    newest = ", ".join(f"{one.label} {quantity(last(one.y))}" for one in series)
    statement = f"mean absolute error in tokens in the newest window of each, {newest}"
    step = f"{errors.step_s // 60} min" if errors.step_s < 3600 else "1 h"
    return Chart(
        key="trend",
        title="Error over time",
        caption=f"Mean absolute error in tokens, by what predicted, in windows of {step}",
        sentence=f"Error over time: {statement if series else 'nothing was predicted in this range'}.",
        x=[timezone.localtime(start) for start in errors.starts],
        across=DAYS,
        up=AMOUNT.but(unit="tokens"),
        series=series,
        empty="" if series else NO_MEASURES,
    )
