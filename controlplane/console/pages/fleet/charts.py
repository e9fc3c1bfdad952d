"""Charts of one instance."""

from collections.abc import Callable

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import (
    AMOUNT,
    COUNT,
    MILLISECONDS,
    NO_SAMPLES,
    NO_TRAFFIC,
    SHARE,
    STYLES,
    Axis,
    Chart,
    Series,
    change,
    last,
)
from controlplane.console.formats import count, milliseconds, percent, quantity
from controlplane.console.live import history
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Instance

FILLED = {"fill": "tozeroy", "fillcolor": "var(--s1-soft)"}
NOTHING = "Nothing was reported in this range."


def line_chart(
    samples: list[Sample],
    key: str,
    title: str,
    caption: str,
    values: list[float | None],
    words: Callable[[float], str],
    up: Axis,
    *others: Series,
    label: str,
    heading: str = "",
    nothing: str = NOTHING,
) -> Chart:
    """Return the chart of one number over time; *words* describe its newest value, *nothing* a range without any."""
    now = last(values)
    statement = nothing if now is None else f"{words(now)}{change(values)}."
    line = Series(label, values, width=2, heading=heading, listed=bool(others), more=FILLED)
    return Chart(
        key=key,
        title=title,
        caption=caption,
        sentence=f"{title}: {statement[:1].lower()}{statement[1:]}",
        x=history.times(samples),
        up=up,
        series=[line, *others],
        empty="" if now is not None else nothing if samples else NO_SAMPLES,
    )


def instance_charts(state: LiveState, minutes: str, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, int(minutes))
        ttft_ms, _, output = history.pace_of_instance(samples, row.name)
        running, waiting = history.load_of_instance(samples, row.name)
        most = count(row.max_num_seqs)

        def load(now: float) -> str:
            return f"{count(now)} of {most} requests running, {count(last(waiting))} waiting"

        inside = Series("waiting inside vLLM", waiting, STYLES[1], heading="Waiting (requests)")
        caption = f"Requests inside the instance; it runs {most} at most"
        kv = history.kv_by_instance(samples, [row.name])[row.name]
        return [
            line_chart(
                samples, "load", "Running and waiting", caption, running, load, COUNT, inside,
                label="running", heading="Running (requests)",
            ),
            line_chart(
                samples, "kv", "KV cache", "Share of the KV cache in use", kv,
                lambda now: f"{percent(now)} in use", SHARE.but(range=[0, 1.02], hoverformat=".1%"), label="KV cache",
            ),
            line_chart(
                samples, "ttft", "Time to first token", "p95 of the last minute", ttft_ms,
                lambda now: f"p95 is {milliseconds(now)}", MILLISECONDS, label="p95", nothing=NO_TRAFFIC,
            ),
            line_chart(
                samples, "throughput", "Throughput", "Output tokens per second", output,
                lambda now: f"{quantity(now)} output tokens a second", AMOUNT.but(unit="tok/s", hoverformat=",.1f"),
                label="output", heading="Output (tok/s)",
            ),
        ]  # fmt: skip

    return once(("instance", row.pk, row.name, minutes, history.newest_s(state.history)), build)
