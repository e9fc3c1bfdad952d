"""The charts of one instance: its load and its KV cache."""

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import (
    NO_SAMPLES,
    TALL_HEIGHT,
    Chart,
    Line,
    as_json,
    change,
    last,
    layout,
    scatter,
)
from controlplane.console.filters import View
from controlplane.console.formats import count, percent
from controlplane.console.live import history
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Instance


def instance_load(samples: list[Sample], name: str, max_num_seqs: int) -> Chart:
    times = history.times(samples)
    running, waiting = history.load_of_instance(samples, name)
    legend = (Line("running", "var(--s1)"), Line("waiting inside vLLM", "var(--s2)", "dash"))
    traces = [
        scatter(times, running, legend[0], 2, fill="tozeroy", fillcolor="var(--s1-soft)"),
        scatter(times, waiting, legend[1]),
    ]
    now = last(running)
    sentence = "Load: nothing was reported in this range."
    if now is not None:
        of = f"{count(now)} of {count(max_num_seqs)} requests running"
        sentence = f"Load: {of}, {count(last(waiting))} waiting{change(running)}."
    return Chart(
        key="load",
        title="Running and waiting",
        caption=f"Requests inside the instance; it runs {count(max_num_seqs)} at most",
        sentence=sentence,
        header=("Time", "Running (requests)", "Waiting (requests)"),
        rows=[list(row) for row in zip(times, running, waiting, strict=True)],
        figure=as_json(traces, layout(yaxis={"tickformat": ",d"})) if now is not None else None,
        legend=legend,
        empty="" if now is not None else ("Nothing was reported in this range." if samples else NO_SAMPLES),
    )


def instance_kv(samples: list[Sample], name: str) -> Chart:
    times = history.times(samples)
    values = history.kv_by_instance(samples, [name])[name]
    line = Line("KV cache", "var(--s1)")
    now = last(values)
    sentence = "KV cache: nothing was reported in this range."
    if now is not None:
        sentence = f"KV cache: {percent(now)} in use{change(values)}."
    y_axis = {"tickformat": ".0%", "range": [0, 1.02], "hoverformat": ".1%"}
    return Chart(
        key="kv",
        title="KV cache",
        caption="Share of the KV cache in use",
        sentence=sentence,
        header=("Time", "KV cache (ratio)"),
        rows=[list(row) for row in zip(times, values, strict=True)],
        figure=as_json(
            [scatter(times, values, line, 2, fill="tozeroy", fillcolor="var(--s1-soft)")],
            layout(height=TALL_HEIGHT, yaxis=y_axis),
        )
        if now is not None
        else None,
        empty="" if now is not None else ("Nothing was reported in this range." if samples else NO_SAMPLES),
    )


def instance_charts(state: LiveState, view: View, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, view.range_s)
        return [
            instance_load(samples, row.name, row.max_num_seqs),
            instance_kv(samples, row.name),
        ]

    return once(("instance", row.pk, row.name, view.range_min, history.newest_s(state.history)), build)
