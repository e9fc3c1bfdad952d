"""Sessions, ours: conversations that stay with one instance, against routing by load, and by load and cached prefixes."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.preserve_routing import INSTANCES, MOONCAKE, MOONCAKE_MODEL, MOONCAKE_SPEEDS
from controlplane.experiments.shared.scenes import requests_of, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.traces import TraceError, load_trace

STICKY: Final = "sticky"
BY_EVENTS: Final = "least_delay, KV events"
ROUTERS: Final = (STICKY, "join_shortest_queue", "least_delay", BY_EVENTS)


def sessions_of(first: NDArray[np.int64], hashes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the session of each request: one continues the session of the latest earlier prompt that it has whole.

    Request i has the blocks ``hashes[first[i] : first[i + 1]]``; the last may be partial. A first block that many share is a
    system prompt, and no session.
    """
    session, last_of, number = np.empty(first.size - 1, np.int64), dict[int, int](), 0
    for at in range(session.size):
        blocks = hashes[first[at] : first[at + 1]].tolist()
        known = next((last_of[block] for block in reversed(blocks[1:]) if block in last_of), None)
        if known is None:
            known, number = number, number + 1
        session[at] = known
        if len(blocks) > 1:
            last_of[blocks[-2] if len(blocks) > 2 else blocks[-1]] = known
    return session


def sticky(trace: Workload, session: NDArray[np.int64]) -> Workload:
    """Return *trace* with each session bound to one instance: as many models as instances, with one instance each."""
    names = [f"{MOONCAKE_MODEL.name}-{at}" for at in range(INSTANCES)]
    return replace(trace, model=Coded((session % INSTANCES).astype(np.int16), names))


def measured(run: Simulated) -> experiment.Row:
    outcomes, requests = run.result.outcomes, run.result.requests
    ttft_s, normalised_s = outcomes["ttft_s"], outcomes["e2e_s"] / requests.output_tokens
    given = Counter(outcomes["instance"].tolist())
    return {
        "ttft_mean_s": float(ttft_s.mean()),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p95_s": float(np.percentile(ttft_s, 95)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "normalised_mean_s": float(normalised_s.mean()),
        "cached": float(outcomes["cached_tokens"].sum() / requests.prompt_tokens.sum()),
        "busiest": max(given.values()) * INSTANCES / requests.count,
    }


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Simulate Mooncake's conversations at several speeds by each router. Raise ValueError where the data is missing."""
    try:
        workload = load_trace(settings["data"] / MOONCAKE, "mooncake", unit="ms")
    except TraceError as error:
        raise ValueError(str(error)) from error
    assert workload.prefix_first is not None
    assert workload.prefix_hashes is not None
    session = sessions_of(workload.prefix_first, workload.prefix_hashes)
    factor = np.exp(0.5 * np.random.default_rng([settings["seed"], 55]).standard_normal(len(workload)))
    predicted = np.clip(np.rint(workload.output_tokens * factor), 1, 8192)

    def case(speed: float, router: str) -> experiment.Case:
        trace = requests_of(
            workload.arrival_s / (speed * settings["scale"]), workload.prompt_tokens, workload.output_tokens, predicted,
            models=[MOONCAKE_MODEL.name], prefix_first=workload.prefix_first, prefix_hashes=workload.prefix_hashes,
            prefix_block_tokens=workload.prefix_block_tokens,
        )  # fmt: skip
        groups: list[dict[str, Any]] = [MOONCAKE_MODEL.group(instances=INSTANCES)]
        if router == STICKY:
            trace = sticky(trace, session)
            groups = [replace(MOONCAKE_MODEL, name=name).group(instances=1) for name in trace.model.names]
        routing = "least_delay" if router in (STICKY, BY_EVENTS) else router
        scenario = scenario_of(groups, policies={"routing": routing, "follow_kv_events": router == BY_EVENTS})
        about = {"requests_per_s": round(len(trace) / float(trace.arrival_s[-1]), 2), "router": router}
        return experiment.Case(about, lambda seed: (scenario, trace))

    cases = [case(speed, router) for speed, router in product(MOONCAKE_SPEEDS, ROUTERS)]
    rows = experiment.run_cases("sessions", cases, measured, progress)
    lengths = Counter(session.tolist()).values()
    about = {"requests": len(workload), "sessions": len(lengths), "continued": float(np.mean(np.array([*lengths]) > 1))}
    return {
        **{name: settings[name] for name in ("seed", "scale")},
        "about": experiment.rounded(about),
        "rows": experiment.rounded(rows),
    }


def show(console: Console, result: experiment.Result) -> None:
    about = result["about"]
    title = (
        f"{about['requests']:,} requests of {about['sessions']:,} sessions, {about['continued']:.0%} of them continued"
    )
    console.print(
        table(title, experiment.columns(experiment.read_data("sessions")["columns"]["routers"]), result["rows"])
    )


SESSIONS: Final = experiment.Experiment.read("sessions", run=run, show=show)
