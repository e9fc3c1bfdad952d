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
from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Instance

FILLED = {"fill": "tozeroy", "fillcolor": "var(--s1-soft)"}
NOTHING = "Nothing was reported in this range."


def instance_charts(state: LiveState, minutes: str, row: Instance) -> list[Chart]:
    def build() -> list[Chart]:
        samples = history.latest(state.history, int(minutes))
        ttft_ms, _, output = history.pace_of_instance(samples, row.name)
        running, waiting = history.load_of_instance(samples, row.name)
        kv = history.kv_by_instance(samples, [row.name])[row.name]
        most = count(row.max_num_seqs)

        def chart(
            key: str, title: str, caption: str, first: Series, words: Callable[[float], str], up: Axis, *others: Series
        ) -> Chart:
            """Return the chart of one number over time; *words* describe its newest value."""
            now, nothing = last(first.y), NO_TRAFFIC if key == "ttft" else NOTHING
            statement = nothing if now is None else f"{words(now)}{change(first.y)}."
            return Chart(
                key=key, title=title, caption=caption, x=history.times(samples), up=up, series=[first, *others],
                sentence=f"{title}: {statement[:1].lower()}{statement[1:]}",
                empty="" if now is not None else nothing if samples else NO_SAMPLES,
            )  # fmt: skip

        def line(label: str, values: list[float | None], heading: str = "", listed: bool = False) -> Series:
            return Series(label, values, width=2, heading=heading, listed=listed, more=FILLED)

        return [
            chart(
                "load", "Running and waiting", f"Requests inside the instance; it runs {most} at most",
                line("running", running, "Running (requests)", listed=True),
                lambda now: f"{count(now)} of {most} requests running, {count(last(waiting))} waiting", COUNT,
                Series("waiting inside vLLM", waiting, STYLES[1], heading="Waiting (requests)"),
            ),
            chart(
                "kv", "KV cache", "Share of the KV cache in use", line("KV cache", kv),
                lambda now: f"{percent(now)} in use", SHARE.but(range=[0, 1.02], hoverformat=".1%"),
            ),
            chart(
                "ttft", "Time to first token", "p95 of the last minute", line("p95", ttft_ms),
                lambda now: f"p95 is {milliseconds(now)}", MILLISECONDS,
            ),
            chart(
                "throughput", "Throughput", "Output tokens per second", line("output", output, "Output (tok/s)"),
                lambda now: f"{quantity(now)} output tokens a second", AMOUNT.but(unit="tok/s", hoverformat=",.1f"),
            ),
        ]  # fmt: skip

    return once(("instance", row.pk, row.name, minutes, history.newest_s(state.history)), build)
