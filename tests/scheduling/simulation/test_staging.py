"""From a scenario to a cluster and requests."""

import tomllib
from pathlib import Path

import numpy as np
import pytest

from controlplane.simulation.whatif.changes.supply import instance_names
from scheduling.lookahead.rule import LookAheadRule
from scheduling.routing.models import Fallback
from scheduling.scaling import Floor
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.measures.results import request_table
from scheduling.simulation.scenario import ScenarioError, load_scenario
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging import Stage, stage
from scheduling.simulation.strategies import Bounds
from tests.scheduling.simulation.test_scenario import EXAMPLES, RIGHT

TRACE = """Timestamp,Model,Request tokens,Response tokens
0,ChatGPT,100,18
4,GPT-4,900,200
8,GPT-4,10,20
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [3, 4]}
{"timestamp": 9, "input_length": 530, "output_length": 5, "hash_ids": [3, 5]}
"""


def staged(folder: Path, text: str, **values) -> Stage:
    path = folder / "scenario.toml"
    path.write_text(text)
    return stage(load_scenario(path), path, **values)


def with_trace(
    folder: Path, lines: str = "", rows: str = TRACE, trace_format: str = "burstgpt", demand: str = ""
) -> str:
    (folder / "rows").write_text(rows)
    head = RIGHT[: RIGHT.index("[demand]")]
    return f'{head}[demand]\n{demand}\n[trace]\nfile = "rows"\nformat = "{trace_format}"\n{lines}'


def test_values_of_a_model_and_of_an_endpoint(tmp_path: Path) -> None:
    own = """[[endpoints]]
model = "m"
region_threshold = 0.5
floor_above = 0.8
[[endpoints]]
model = "m"
region = "west"
floor_cooldown_s = 60
swap_by_queue = false
[classes.iw]"""
    made = staged(tmp_path, RIGHT.replace("[classes.iw]", own))
    east, west = made.cluster.policy(("m", "east")), made.cluster.policy(("m", "west"))
    assert (east.region_threshold, west.region_threshold) == (0.5, 0.5)
    assert (east.swap_by_queue, west.swap_by_queue) == (True, False)
    assert made.scaled is not None
    assert made.scaled.floor == {("m", "east"): Floor(0.8, 15.0), ("m", "west"): Floor(0.8, 60.0)}
    result = made.run()
    assert (result.outcomes["state"] == Outcome.DONE).all()


SHARED = """kv_tokens = 16000
sharing = { group = "pair", sleep_s = 1, wake_s = 2, reload_s = 9, weights_gb = 4 }

[[fleet]]
model = "other"
regions = ["east", "west"]
gpu = "g"
instances = 0
asleep = 2
kv_tokens = 16000
sharing = { group = "pair", sleep_s = 1, wake_s = 3, reload_s = 9, weights_gb = 5 }

[swap_groups.pair]
cpu_memory_gb = 4

[models.other]
context_tokens = 1000

[[profiles]]
model = "other"
gpu = "g"
prefill = { a_s = 0.01, b_s_per_token = 1e-4 }
decode = { a_s = 0.01 }
"""


def test_instances_that_share_their_gpus(tmp_path: Path) -> None:
    """One instance of each model per number and region; the second model's weights do not fit into CPU memory."""
    made = staged(tmp_path, RIGHT.replace("kv_tokens = 16000\n", SHARED))
    groups = made.cluster.swap_groups()
    assert groups == ["pair-east-1", "pair-east-2", "pair-west-1", "pair-west-2"]
    assert {spec.sharing.memory_bytes for spec in made.cluster.instances} == {4e9}
    simulation = Simulation(made.cluster, made.requests)
    lives = simulation.world.lives.instances
    assert lives["swap_group"].tolist() == [0, 1, 2, 3] * 2
    assert lives["in_memory"].tolist() == [0] * 8
    simulation.swap_to(4)
    simulation.advance(0.5)
    assert simulation.states[0] in (State.DRAINING, State.FALLING_ASLEEP)
    simulation.advance(60.0)
    assert simulation.states[[0, 4]].tolist() == [State.ASLEEP, State.READY]
    assert simulation.world.lives.instances["in_memory"][0] == 1


@pytest.mark.parametrize("scaled", [True, False])
def test_models_on_the_same_gpus_are_swapped_on_demand(tmp_path: Path, scaled: bool) -> None:
    text = RIGHT.replace("kv_tokens = 16000\n", SHARED) + RIGHT[RIGHT.index("[[clients]]") :].replace('"m"', '"other"')
    if not scaled:
        text = text.replace(text[text.index("[scaling]") : text.index("[demand]")], "")
    run = staged(tmp_path, text).run()
    outcomes = run.outcomes
    assert (outcomes["state"] == Outcome.DONE).all()
    assert run.counters["swaps"] > 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "asleep = 2",
            "spot = 2",
            r"fleet\[1\].instances: another group that shares GPUs as pair has them at the start",
        ),
        ('gpu = "g"\ninstances = 0', 'gpu = "h"\ninstances = 0', r"fleet\[1\].gpu: is not that of all that share GPUs"),
        ("[swap_groups.pair]", "[swap_groups.other]", "no group of the fleet shares its GPUs by this name"),
    ],
)
def test_swap_groups_that_make_no_sense(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = RIGHT.replace("kv_tokens = 16000\n", SHARED).replace("[gpus.g]", "[gpus.h]\n[gpus.g]")
    profile = text[text.index("[[profiles]]") : text.index("[[fleet]]")]
    assert old in text
    with pytest.raises(ScenarioError, match=message):
        staged(tmp_path, text.replace(old, new) + profile.replace('"g"', '"h"').replace('"m"', '"other"'))


OF_ALL = ("[classes.iw]", "[policies]\nbundle = 'PreServe'\n[classes.iw]")
OF_THE_MODEL = ("context_tokens = 1000", "context_tokens = 1000\nbundle = 'preserve'")
STRATEGY = ('strategy = "reactive"\n', "")


@pytest.mark.parametrize("given", [(OF_ALL, STRATEGY), (OF_THE_MODEL, STRATEGY), (OF_THE_MODEL,)])
def test_a_bundle_gives_every_policy_of_its_models(tmp_path: Path, given: list[tuple[str, str]]) -> None:
    text = RIGHT
    for old, new in given:
        text = text.replace(old, new)
    made, scenario = staged(tmp_path, text), load_scenario(tmp_path / "scenario.toml")
    for key in made.cluster.endpoints:
        assert made.cluster.policy(key).routing == "preserve"
        assert made.cluster.policy(key).ordering == "fcfs"
        assert made.cluster.policy(key).region_threshold == 0.7
        assert made.scaled is not None
        assert made.scaled.strategies[key].name == "preserve"
        assert made.scaled.bounds[key] == Bounds(1, 4)
        assert scenario.at(*key).forecaster == "mlstm"


def test_keys_given_with_a_bundle_override_it(tmp_path: Path) -> None:
    text = RIGHT.replace("[classes.iw]", "[policies]\nbundle = 'preserve'\nordering = 'priority'\n[classes.iw]")
    own = "[[endpoints]]\nmodel = 'm'\nregion = 'west'\nrouting = 'round_robin'\n[classes.iw]"
    made = staged(tmp_path, text.replace("[classes.iw]", own))
    east, west = made.cluster.policy(("m", "east")), made.cluster.policy(("m", "west"))
    assert (east.routing, west.routing) == ("preserve", "round_robin")
    assert east.ordering == west.ordering == "priority"
    assert made.scaled is not None
    assert {each.name for each in made.scaled.strategies.values()} == {"reactive"}  # of [scaling]


def test_a_bundle_scales_without_a_table_for_it(tmp_path: Path) -> None:
    text = RIGHT[: RIGHT.index("[scaling]")] + RIGHT[RIGHT.index("[demand]") :]
    assert staged(tmp_path, text).scaled is None
    made = staged(tmp_path, text.replace(*OF_THE_MODEL))
    assert made.scaled is not None
    assert made.scaled.bounds["m", "east"] == Bounds()
    assert made.scaled.one.name == "preserve"


def test_the_fleet(tmp_path: Path) -> None:
    text = RIGHT.replace("instances = 2", "instances = 2\nspot = 1\nempty = 1\ntensor_parallel = 2").replace(
        'gpu = "g"\nprefill', 'gpu = "g"\ntensor_parallel = 2\nprefill'
    )
    made = staged(tmp_path, text)
    states = [spec.state for spec in made.cluster.instances]
    assert states == 2 * [State.READY, State.READY, State.SPOT, State.EMPTY]
    assert made.cluster.endpoints == [("m", "east"), ("m", "west")]
    assert {spec.gpu_type for spec in made.cluster.instances} == {"2 x g"}
    assert {spec.usd_per_hour for spec in made.cluster.instances} == {4.0}
    assert made.cluster.latency_s.tolist() == [[0.0, 0.06], [0.06, 0.0]]
    assert made.cluster.instances[0].engine.kv_blocks == 1000
    assert made.cluster.promises[0].ttft_s == 0.5


def test_synthetic_requests(tmp_path: Path) -> None:
    made = staged(tmp_path, RIGHT)
    requests = made.requests
    assert requests.count == pytest.approx(360, rel=0.2)
    assert set(requests.region.tolist()) == {0, 1}
    assert (requests.prompt_tokens + requests.output_tokens).max() <= 1000
    assert np.array_equal(requests.arrival_s, staged(tmp_path, RIGHT).requests.arrival_s)
    assert not np.array_equal(requests.arrival_s[:50], staged(tmp_path, RIGHT, seed=4).requests.arrival_s[:50])
    assert np.array_equal(requests.predicted_tokens, requests.output_tokens)


def test_predictions_may_err(tmp_path: Path) -> None:
    made = staged(
        tmp_path, RIGHT.replace("duration_h = 0.1", "duration_h = 1\n[predictions]\nkind = 'error'\nlog_sd = 0.5")
    )
    ratio = np.log(made.requests.predicted_tokens / made.requests.output_tokens)
    assert ratio.std() == pytest.approx(0.5, rel=0.1)
    assert abs(ratio.mean()) < 0.05


def test_a_trace(tmp_path: Path) -> None:
    made = staged(tmp_path, with_trace(tmp_path, 'speed = 2.0\nregion = "west"', demand='too_long = "drop"'))
    assert made.requests.arrival_s.tolist() == [0.0, 4.0]
    assert made.requests.region.tolist() == [1, 1]
    assert made.left_out == 1
    assert made.tenants == ["trace"]


def test_a_trace_of_prompts_alone(tmp_path: Path) -> None:
    """Of a model that pools, outputs are ignored and a prompt may fill the context; of one that generates, rows without
    output are left out.
    """
    rows = TRACE.replace("100,18", "100,0").replace("900,200", "1000,0")
    text = with_trace(tmp_path, rows=rows)
    assert staged(tmp_path, text).left_out == 2
    pooling = text.replace("context_tokens = 1000", "context_tokens = 1000\ntask = 'embed'")
    made = staged(
        tmp_path, pooling.replace("decode = { a_s = 0.01 }", "") + "[predictions]\nkind = 'error'\nbias = 9.0"
    )
    assert (made.left_out, made.requests.prompt_tokens.tolist()) == (0, [100, 1000, 10])
    assert made.requests.predicted_tokens.tolist() == made.requests.output_tokens.tolist() == [1, 1, 1]
    result = Simulation(made.cluster, made.requests).run()
    assert set(result.outcomes["state"].tolist()) == {Outcome.DONE}
    assert result.output_tokens.tolist() == [0, 0, 0]
    (tmp_path / "rows").write_text(rows.replace("1000,0", "1001,0"))
    with pytest.raises(ScenarioError, match="request 1 has 1002 tokens, m takes 1001"):
        staged(tmp_path, pooling)


def test_longer_than_the_context(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"trace: request 1 has 1100 tokens, m takes 1000: set demand.too_long"):
        staged(tmp_path, with_trace(tmp_path))
    made = staged(tmp_path, with_trace(tmp_path, demand='too_long = "clip"'))
    assert made.clipped == 1
    assert (made.requests.prompt_tokens[1], made.requests.output_tokens[1]) == (800, 200)


def test_longer_than_the_kv_cache(tmp_path: Path) -> None:
    text = with_trace(tmp_path).replace("kv_tokens = 16000", "kv_tokens = 512")
    with pytest.raises(ScenarioError, match=r"request 1 has 1100 tokens, m takes 513"):
        staged(tmp_path, text)


def test_a_wrong_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"line 40, trace.file: .*nowhere: No such file"):
        staged(tmp_path, with_trace(tmp_path).replace('"rows"', '"nowhere"'))
    with pytest.raises(ValueError, match=r"rows, line 4, column Timestamp: request 3 came 4 s before the one above it"):
        staged(tmp_path, with_trace(tmp_path, rows=TRACE.replace("8,GPT-4", "0,GPT-4")))
    with pytest.raises(ScenarioError, match="trace: gives no requests"):
        staged(tmp_path, with_trace(tmp_path, rows=TRACE[: TRACE.index("\n") + 1]))


def test_models_of_a_trace_must_have_a_name_here(tmp_path: Path) -> None:
    more = RIGHT[: RIGHT.index("[demand]")].replace("[gpus.g]", "[models.n]\ncontext_tokens = 2000\n[gpus.g]")
    for table in ("[[profiles]]", "[[fleet]]"):
        part = more[more.index(table) : more.index("\n\n", more.index(table))]
        more = more.replace(part, part + "\n\n" + part.replace('model = "m"', 'model = "n"'))
    trace = '[demand]\ntoo_long = "clip"\n[trace]\nfile = "rows"\nformat = "burstgpt"\n'
    (tmp_path / "rows").write_text(TRACE)
    with pytest.raises(ScenarioError, match=r"the trace's model 'ChatGPT' is none of m, n"):
        staged(tmp_path, more + trace)
    made = staged(tmp_path, more + trace + 'model = "n"\nmodels = { GPT-4 = "m" }\n')
    assert [made.cluster.models[code] for code in made.requests.model] == ["n", "m", "m"]


def test_prefixes_become_blocks_of_the_engine(tmp_path: Path) -> None:
    text = with_trace(tmp_path, 'unit = "ms"\n', rows=MOONCAKE, trace_format="mooncake")
    assert staged(tmp_path, text).requests.prefix_hashes.size == 0  # no engine caches them
    made = staged(tmp_path, text.replace("instances = 2", "instances = 2\nprefix_caching = true"))
    first, hashes = made.requests.prefix_first, made.requests.prefix_hashes
    assert first.tolist() == [0, 700 // 16, 700 // 16 + 530 // 16]
    one, other = hashes[: first[1]], hashes[first[1] :]
    assert np.array_equal(one[:32], other[:32])  # 512 tokens in common
    assert other[32] not in one
    assert np.unique(one).size == one.size


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([24], r"fleet\[0\].block_size_tokens: is 24, and must divide the 512 tokens"),
        ([16, 32], r"fleet\[1\].block_size_tokens: is 32, that of another group which caches prefixes 16"),
    ],
)
def test_prefixes_need_one_block_size_that_divides_the_traces(tmp_path: Path, sizes: list[int], message: str) -> None:
    text = with_trace(tmp_path, 'unit = "ms"\n', rows=MOONCAKE, trace_format="mooncake")
    table = text[text.index("[[fleet]]") : text.index("\n\n", text.index("[[fleet]]"))]
    tables = [f"{table}\nprefix_caching = true\nblock_size_tokens = {size}" for size in sizes]
    with pytest.raises(ScenarioError, match=message):
        staged(tmp_path, text.replace(table, "\n\n".join(tables)))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[delays]\nspot_minutes = 1\n", r"delays.spot_minutes: is not a key here; there is spot_median_s"),
        ("[delays]\nspot_max_s = 1\n", r"delays: spot_median_s \(60.0\) is more than spot_max_s"),
        ("[policies.batching]\nmode = 'dynamic'\n", r"policies.batching: max_batch_size must be at least 1"),
    ],
)
def test_what_the_cluster_refuses_is_named(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        staged(tmp_path, RIGHT.replace("[demand]", lines + "[demand]"))


def test_the_look_ahead_is_set_for_all_endpoints_or_for_some(tmp_path: Path) -> None:
    for_all = "[policies.look_ahead]\niterations = 50\noverload_above = 0.5\n"
    cluster = staged(tmp_path, RIGHT.replace("[demand]", for_all + "[demand]")).cluster
    rule = LookAheadRule(50, overload_above=0.5)
    assert all(cluster.policy(key).look_ahead == rule for key in cluster.endpoints)
    model, region = cluster.endpoints[0]
    own = f"[[endpoints]]\nmodel = '{model}'\nregion = '{region}'\nlook_ahead = {{ beta = 2.0 }}\n"
    cluster = staged(tmp_path, RIGHT.replace("[demand]", own + for_all + "[demand]")).cluster
    assert cluster.policy((model, region)).look_ahead == LookAheadRule(beta=2.0)


@pytest.mark.parametrize("name", ["small", "day_with_bursts"])
def test_the_examples_can_be_staged(name: str) -> None:
    path = EXAMPLES / f"{name}.toml"
    made = stage(load_scenario(path), path)
    assert made.requests.count > 1000
    assert made.left_out == 0


def test_instances_of_two_gpu_types_have_distinct_names_ready_ones_the_first(tmp_path: Path) -> None:
    more = """[gpus.h]
usd_per_hour = 4

[[profiles]]
model = "m"
gpu = "h"
prefill = { a_s = 0.01, b_s_per_token = 1e-4 }
decode = { a_s = 0.005 }

[[fleet]]
model = "m"
regions = ["east"]
gpu = "h"
instances = 1
empty = 1
kv_tokens = 16000

[classes.iw]"""
    text = RIGHT.replace("[classes.iw]", more).replace("instances = 2\n", "instances = 2\nempty = 1\n")
    specs = staged(tmp_path, text).cluster.instances
    assert {spec.name: (spec.gpu_type, spec.state) for spec in specs if spec.region == "east"} == {
        "m-east-1": ("g", State.READY),
        "m-east-2": ("g", State.READY),
        "m-east-4": ("g", State.EMPTY),
        "m-east-3": ("h", State.READY),
        "m-east-5": ("h", State.EMPTY),
    }
    values = tomllib.loads(text)
    assert instance_names(values)["m", "east"] == ["m-east-1", "m-east-2", "m-east-3"]


def test_requests_for_a_public_name_are_shared_by_weight(tmp_path: Path) -> None:
    client = RIGHT.index("[[clients]]")
    profiles, fleet = RIGHT.index("[[profiles]]"), RIGHT.index("[classes.iw]")
    text = (
        RIGHT[:fleet]
        + RIGHT[profiles:fleet].replace('"m"', '"n"')
        + "[models.n]\ncontext_tokens = 1000\n[weighted_targets.chat]\nm = 3\nn = 1\n"
        + RIGHT[fleet:client]
        + RIGHT[client:].replace('"m"', '"chat"')
    ).replace("requests_per_s = 1", "requests_per_s = 4")
    made = staged(tmp_path, text)
    share = float(np.mean(np.array(made.cluster.models)[made.requests.model] == "n"))
    assert made.requests.count > 1000
    counted = request_table(made.run(), made.tenants).rows
    asked = {(by, group): value for by, group, name, _, value in counted if name == "requests" and by != "tenant"}
    assert asked["asked_model", "chat"] == asked["model_rule", "weights"] == asked["all", "all"]
    assert asked["model", "n"] == round(share * made.requests.count)
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / made.requests.count) ** 0.5
    for wrong, message in (("o = 1", "there is no model 'o'"), ("n = -1", "greater than or equal to 0")):
        with pytest.raises(ScenarioError, match=message):
            staged(tmp_path, text.replace("n = 1\n", f"{wrong}\n"))


def test_a_model_has_a_fallback_and_its_contradictions_are_named(tmp_path: Path) -> None:
    profiles, fleet = RIGHT.index("[[profiles]]"), RIGHT.index("[classes.iw]")
    text = (
        RIGHT[:fleet]
        + RIGHT[profiles:fleet].replace('"m"', '"n"')
        + "[models.n]\ncontext_tokens = 900\n"
        + RIGHT[fleet:]
    )
    values = tomllib.loads(text)
    values["models"]["m"] |= {"fallback": "n", "fallback_wait_s": 0.0}
    values["failures"] = [{"at_h": 0.03, "model": "m", "region": region} for region in ("east", "west")]
    made = stage(check_scenario(values, tmp_path))
    assert made.cluster.fallbacks == {"m": Fallback("n", 0.0)}
    result = made.run()
    counted = {
        (by, group): value
        for by, group, name, _, value in request_table(result, made.tenants).rows
        if name == "requests"
    }
    assert counted["asked_model", "m"] == made.requests.count
    assert counted["model", "n"] == counted["model_rule", "unavailable"] == result.counters["fell_back_unavailable"] > 0
    assert counted["model", "n"] + counted["model_rule", "none"] == made.requests.count
    assert (result.outcomes["state"] == Outcome.DONE).sum() > 0.9 * made.requests.count
    for wrong, message in (
        ({"fallback": "o"}, "there is no model 'o'"),
        ({"fallback": "m"}, "is the model itself"),
        ({"fallback": None}, "fallback_wait_s is given without a fallback"),
    ):
        bad = values | {"models": values["models"] | {"m": values["models"]["m"] | wrong}}
        with pytest.raises(ScenarioError, match=message):
            check_scenario(bad, tmp_path)
