"""Requests and clusters that make no sense are refused, saying what is wrong and where."""

import numpy as np
import pytest

from scheduling.policy import Batching
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import ENGINE, cluster, instance

GOOD = {"arrival_s": [0.0, 1.0, 2.0], "prompt_tokens": [4, 4, 4], "output_tokens": [2, 2, 2]}


def refused(match: str, fleet: Cluster | None = None, **columns):
    with pytest.raises(ValueError, match=match):
        Simulation(fleet or cluster(), make_requests(**(GOOD | columns)))


def test_good_requests_are_taken():
    result = Simulation(cluster(), make_requests(**GOOD)).run()
    assert (result.outcomes["state"] == 2).all()


def test_times_are_checked():
    refused(r"arrival_s\[2\] is 0.5: earlier than the one before it", arrival_s=[0.0, 1.0, 0.5])
    refused(r"arrival_s\[0\] is -1.0: before the start", arrival_s=[-1.0, 1.0, 2.0])
    refused(r"arrival_s\[1\] is nan: not a moment", arrival_s=[0.0, np.nan, 2.0])
    refused(r"arrival_s\[2\] is inf: not a moment", arrival_s=[0.0, 1.0, np.inf])
    refused(r"deadline_s\[1\] is 0.0", deadline_s=[1.0, 0.0, 1.0])
    refused(r"deadline_s\[0\] is nan", deadline_s=[np.nan, 1.0, 1.0])


def test_an_unsorted_time_is_found_between_chunks(monkeypatch):
    monkeypatch.setattr("scheduling.simulation.workload.requests.CHUNK", 2)
    refused(r"arrival_s\[2\] is 0.5: earlier", arrival_s=[0.0, 1.0, 0.5])


def test_tokens_are_checked():
    refused(r"prompt_tokens\[1\] is 0", prompt_tokens=[4, 0, 4])
    refused(r"output_tokens\[0\] is -2", output_tokens=[-2, 1, 1])
    refused(r"predicted_tokens\[2\] is 0", predicted_tokens=[1, 1, 0])
    refused(r"prompt_tokens\[0\] is 1.5: not a whole number", prompt_tokens=[1.5, 2, 3])
    refused(r"prompt_tokens\[2\] is nan: not a whole number", prompt_tokens=[1, 2, np.nan])
    refused(r"output_tokens\[1\] is \d+: out of range", output_tokens=[1, 2**40, 1])


def test_a_request_longer_than_the_context_is_refused():
    refused(r"request 1 has 1001 tokens.*instances of m hold at most 1000", prompt_tokens=[4, 999, 4])
    small = cluster(instance(), instance(engine=config(kv_blocks=5)))  # 20 tokens, and the last is never computed
    refused(r"request 2 has 22 tokens.*at most 21", small, prompt_tokens=[4, 19, 20])
    # The smallest of its model's instances counts, not that of another model.
    Simulation(cluster(instance(), instance("other", engine=config(kv_blocks=5))), make_requests(**GOOD)).run()


def test_models_and_regions_are_checked():
    refused(r"model\[2\] is 1: there are 1 models", model=[0, 0, 1])
    refused(r"region\[0\] is -1: there are 1 regions", region=[-1, 0, 0])
    refused(r"model\[1\] is 1: empty has no instance", cluster(models=["m", "empty"]), model=[0, 1, 0])


def test_lengths_of_columns_are_checked():
    refused(r"output_tokens has the shape \(2,\); there are 3 requests", output_tokens=[1, 2])
    refused(r"prefix_blocks has 1 elements", prefix_blocks=[[1]])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Batching("sometimes"), "mode must be"),
        (lambda: Batching("dynamic"), "max_batch_size must be at least 1"),
        (lambda: Batching("dynamic", 4, -1.0), "wait_timeout_s"),
        (
            lambda: Reactive(min_instances=5, max_instances=4),
            r"min_instances \(5\) must be from 0 to max_instances \(4\)",
        ),
        (lambda: Reactive(out_above=0.2), "in_below"),
        (lambda: Simulation(cluster(), make_requests(**GOOD), sample_s=-1.0), "sample_s"),
        (lambda: Simulation(cluster(), make_requests(**GOOD)).run(tick_s=0.0), "tick_s"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_prefix_hashes_are_checked_where_prefixes_are_cached():
    caching = instance(engine=config(prefix_caching=True))
    refused(
        "request 1 has 2 prefix hashes; its prompt of 4 tokens has 1", cluster(caching), prefix_blocks=[[], [1, 2], []]
    )
    other = instance(engine=config(prefix_caching=True, block_size_tokens=2))
    refused("blocks of 2 and 4 tokens", cluster(caching, other), prefix_blocks=[[], [1], []])
    requests = make_requests(**GOOD, prefix_blocks=[[], [1], []])
    for first in ([0, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1], [0, 0, 1, 2]):
        with pytest.raises(ValueError, match="prefix_first must rise from 0"):
            Simulation(cluster(caching), requests._replace(prefix_first=np.array(first)))
    # Where nobody caches, they are of no matter.
    Simulation(cluster(), make_requests(**GOOD, prefix_blocks=[[], [1, 2], []])).run()


def test_requests_that_can_never_be_served_are_refused_or_reported():
    asleep = cluster(instance(state=State.ASLEEP))
    result = Simulation(asleep, make_requests(**GOOD)).run()
    assert (result.outcomes["state"] == 4).all()
    assert result.counters["refused"] == 3
    assert np.isnan(result.outcomes["ttft_s"]).all()


def test_one_scalar_holds_for_all_without_memory():
    requests = make_requests(np.arange(5.0), 4, 2, priority=3)
    assert requests.prompt_tokens.strides == requests.priority.strides == (0,)
    assert Simulation(Cluster([InstanceSpec("m", "r", ENGINE)]), requests).run().counters["ended"] == 5


def test_without_prefix_caching_there_is_no_cache():
    simulation = Simulation(cluster(), make_requests(**GOOD, prefix_blocks=[[1], [1], [1]]))
    assert sum(array.nbytes for array in simulation.world.engines.cache) < 100
    assert simulation.run().counters["prefix_queried_tokens"] == 0
