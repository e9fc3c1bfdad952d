"""Models that embed under both clocks: the dispatcher and a simulated scenario give prompts without output to the same
instances, in the same order, at the same moment, next to a model that generates."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.dispatch.port import Advanced, Asked, Finished
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.measures.results import latency_s
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging import stage
from tests.dispatch.test_twin import Live, serve_both
from tests.examples import at_night_but

REGIONS = ["east", "north", "west"]
EMBEDS, GENERATES = "e", "m"
ROUTINGS = ["join_shortest_queue", "least_request", "minimum_use", "preserve", "least_delay"]


def staged(routing, ordering):
    """Return the cluster and requests of a scenario; its engine limits are small, so that requests wait."""
    group = {"gpu": "g", "regions": REGIONS, "instances": 2, "block_size_tokens": 4}
    client = {"tenant": "t", "slo_class": "chat", "cv": 2.0}
    prefill = {"t0_s": 0.05, "a_s": 0.04, "b_s_per_token": 1e-3}
    scenario = {
        "models": {EMBEDS: {"context_tokens": 120, "task": "embed"}, GENERATES: {"context_tokens": 120}},
        "gpus": {"g": {}},
        "regions": {name: {} for name in REGIONS},
        "classes": {"chat": {"ttft_ms": 2000.0}},
        "profiles": [
            {"model": EMBEDS, "gpu": "g", "prefill": prefill},
            {"model": GENERATES, "gpu": "g", "prefill": prefill, "decode": {"a_s": 0.04, "b_s_per_sequence": 0.002}},
        ],
        "fleet": [
            group | {"model": EMBEDS, "kv_tokens": 240, "max_num_seqs": 3, "max_num_batched_tokens": 100},
            group | {"model": GENERATES, "kv_tokens": 160, "max_num_seqs": 4, "max_num_batched_tokens": 40},
        ],
        "policies": {"routing": routing, "ordering": ordering, "sweeps": False, "queue_bound": 40},
        "demand": {"duration_h": 10 / 3600, "too_long": "clip"},
        "clients": [
            client | {"model": EMBEDS, "requests_per_s": 60.0, "prompt": {"median": 40, "p95": 130}},
            client
            | {
                "model": GENERATES,
                "requests_per_s": 10.0,
                "prompt": {"median": 20, "p95": 50},
                "output": {"median": 15, "p95": 50},
            },
        ],
    }
    staged = stage(check_scenario(scenario, Path("twin.toml")), seed=3)
    return staged.cluster, staged.requests


class AtGateway(Live):
    """Live, with what a gateway says of requests without output: their answers come whole, after a single token."""

    def __init__(self, fleet, requests):
        super().__init__(fleet)
        pools = fleet.models.index(EMBEDS)
        pooled, take = set(np.flatnonzero(requests.model == pools).tolist()), self.dispatcher.take

        def gateway(record):
            match record:
                case Asked() if record.number in pooled:
                    record = replace(record, streamed=False, evictable=False, max_tokens=1)
                case Advanced():
                    record = replace(record, tokens=tuple(each for each in record.tokens if each[0] not in pooled))
                case Finished() if record.number in pooled:
                    record = Finished(record.number, 0)
            take(record)

        self.dispatcher.take = gateway


@pytest.mark.parametrize("ordering", at_night_but(["priority"], ["fcfs", "priority", "ssjf", "slack"]))
@pytest.mark.parametrize("routing", at_night_but(["join_shortest_queue", "preserve"], ROUTINGS))
async def test_the_dispatcher_and_the_simulator_place_embeddings_alike(routing, ordering):
    fleet, requests = staged(routing, ordering)
    live = AtGateway(fleet, requests)
    result = serve_both(live, fleet, requests)
    refused = np.flatnonzero(result.outcomes["state"] == Outcome.REFUSED).tolist()
    assert [number for number, _ in live.refused] == refused
    pooled = requests.model == fleet.models.index(EMBEDS)
    assert (result.outcomes["queue_s"][pooled] > 0).sum() > 50, "or order would hardly matter"
    assert requests.prompt_tokens[pooled].max() == 120, "a prompt as long as the context"
    assert result.output_tokens[pooled].max() == 0 < result.output_tokens[~pooled].min()
    done = pooled & (result.outcomes["state"] == Outcome.DONE)
    np.testing.assert_allclose(result.outcomes["ttft_s"][done], result.outcomes["e2e_s"][done])
    assert np.isnan(latency_s(result, "itl")[pooled]).all()
    assert np.isnan(latency_s(result, "normalised")[pooled]).all()
