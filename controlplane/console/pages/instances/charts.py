"""The charts of one instance: its load and its KV cache."""

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import COUNT, NO_SAMPLES, SHARE, STYLES, Chart, Series, change, last
from controlplane.console.formats import count, percent
from controlplane.console.live import history
from controlplane.console.live.history import Sample
from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Instance

FILLED = {"fill": "tozeroy", "fillcolor": "var(--s1-soft)"}
NOTHING = "Nothing was reported in this range."


def instance_load(samples: list[Sample], name: str, max_num_seqs: int) -> Chart:
    running, waiting = history.load_of_instance(samples, name)
    now, sentence = last(running), "Load: nothing was reported in this range."
    if now is not None:
        of = f"{count(now)} of {count(max_num_seqs)} requests running"
        sentence = f"Load: {of}, {count(last(waiting))} waiting{change(running)}."
    return Chart(
        key="load",
        title="Running and waiting",
        caption=f"Requests inside the instance; it runs {count(max_num_seqs)} at most",
        sentence=sentence,
        x=history.times(samples),
        up=COUNT,
        series=[
            Series("running", running, width=2, heading="Running (requests)", more=FILLED),
            Series("waiting inside vLLM", waiting, STYLES[1], heading="Waiting (requests)"),
        ],
        empty="" if now is not None else NOTHING if samples else NO_SAMPLES,
    )


def instance_kv(samples: list[Sample], name: str) -> Chart:
    values = history.kv_by_instance(samples, [name])[name]
    now = last(values)
    in_use = "nothing was reported in this range" if now is None else f"{percent(now)} in use{change(values)}"
    return Chart(
        key="kv",
        title="KV cache",
        caption="Share of the KV cache in use",
        sentence=f"KV cache: {in_use}.",
        x=history.times(samples),
        up=SHARE.but(range=[0, 1.02], hoverformat=".1%"),
        series=[Series("KV cache", values, width=2, listed=False, more=FILLED)],
        empty="" if now is not None else NOTHING if samples else NO_SAMPLES,
    )


def instance_charts(state: LiveState, minutes: str, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, int(minutes))
        return [instance_load(samples, row.name, row.max_num_seqs), instance_kv(samples, row.name)]

    return once(("instance", row.pk, row.name, minutes, history.newest_s(state.history)), build)
