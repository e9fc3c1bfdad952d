"""Application runs of a scenario: drawn, simulated under orders by run, measured; wrong tables are named."""

import json
import tomllib
from math import inf

import numpy as np
import pytest

from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, Step
from scheduling.applications.standings import Reading
from scheduling.applications.suite import MIX, SUITE, mixed
from scheduling.fleet.profile import Profile
from scheduling.simulation.measures.results import runs_by_application
from scheduling.simulation.scenario import ScenarioError, load_scenario
from scheduling.simulation.scenario.toml_text import to_toml
from scheduling.simulation.staging import Stage, stage
from scheduling.simulation.staging.applications import expected_calls
from scheduling.simulation.workload.runs import alone_s
from tests.scheduling.simulation.test_scenario import RIGHT

SLOW = Profile(0.0, 0.02, 7.5e-5, 0.0, 0.018, 1.2e-4, 4e-7)
ROOM = RIGHT.replace("context_tokens = 1000", "context_tokens = 4096")
HEAD = ROOM[: ROOM.index("[scaling]")] + '[demand]\nduration_h = 0.1\ntoo_long = "clip"\n'
RUNS = '\n[[applications]]\nmodel = "m"\nslo_class = "iw"\nruns = 12\n'
GRAPH = DemandGraph(
    "two",
    {"write": Backend("llm", "elsewhere"), "test": Backend("container", "python")},
    [
        RunRecord((Step("write", -1, 100.0, 10.0 + each, parallelism=2), Step("test", 0, duration_s=2.0)))
        for each in range(20)
    ],
)


def staged(folder, tables: str, head: str = HEAD, **values) -> Stage:
    path = folder / "scenario.toml"
    path.write_text(head + tables)
    return stage(load_scenario(path), path, **values)


@pytest.mark.parametrize("name", SUITE)
def test_runs_of_the_suite_are_within_their_sizes(name):
    """Service of the LLM units alone on a 7B model, and time of the others: the paper's sizes."""
    application, random = SUITE[name], np.random.default_rng(3)
    units = application.backends("m")
    runs = [application.run(random) for _ in range(60)]
    assert {step.unit for run in runs for step in run.steps} <= set(units)
    assert application.run(np.random.default_rng(5)) == application.run(np.random.default_rng(5))
    rate = SLOW.decode_a_s
    service_s = [
        sum(
            step.parallelism * (rate * step.output_tokens + 7.5e-5 * step.input_tokens) + step.duration_s
            for step in run.steps
        )
        for run in runs
    ]
    least, most = {"small": (0, 60), "medium": (40, 600), "large": (400, inf), "other": (0, inf)}[application.size]
    assert least <= float(np.median(service_s)) <= most


def test_the_mix_keeps_the_shares_of_sizes():
    names = mixed(300, np.random.default_rng(1))
    sizes = [SUITE[name].size for name in names]
    assert {size: sizes.count(size) / 300 for size in MIX} == pytest.approx(MIX, abs=0.01)
    assert names != sorted(names)
    with pytest.raises(ValueError, match="none of LLMR has a share"):
        mixed(3, np.random.default_rng(1), ["LLMR"])


def test_a_run_alone_takes_its_longest_chain():
    record = RunRecord((
        Step("write", -1, 100.0, 11.0, parallelism=2), Step("test", 0, duration_s=5.0), Step("write", 0, 100.0, 2.0),
    ))  # fmt: skip
    profile = Profile(0.0, 0.1, 0.001, 0.0, 0.01, 0.001, 0.0)
    first_s = 0.1 + 0.2 + 10 * 0.012
    assert alone_s(record, GRAPH.units, lambda model: (profile, 10_000)) == pytest.approx(first_s + 5.0)
    two_batches_s = 2 * (0.1 + 0.1 + 10 * 0.011)
    assert alone_s(record, GRAPH.units, lambda model: (profile, 111)) == pytest.approx(two_batches_s + 5.0)


def test_runs_of_a_scenario_are_simulated_and_measured(tmp_path):
    tables = RUNS.replace("runs = 12", 'runs = 12\nsuite = "KBQAV"\ntenants = 3\ndeadline_factor = [1.2, 100.0]')
    tables += RUNS.replace("runs = 12", f"runs_per_h = 100\ngraph = {_inline(GRAPH)}\ncv = 2.0")
    head = ROOM.replace("[demand]", '[demand]\ntoo_long = "clip"')
    made = staged(tmp_path, tables, head)
    assert made.runs is not None
    assert [each.name for each in made.runs.applications] == ["KBQAV", "two"]
    assert sorted(made.tenants) == ["applications", "applications 1", "applications 2", "applications 3", "t"]
    assert made.runs.applications[1].units["write"].name == "m"
    result = made.run()
    rows = runs_by_application(result)
    assert rows["KBQAV"]["runs"] == rows["KBQAV"]["ended"] == rows["KBQAV"]["due"] == 12
    assert 1 <= rows["KBQAV"]["in_time"] <= 12
    assert rows["two"]["due"] == 0
    assert rows["two"]["mean_s"] > 2.0
    assert rows["all"]["runs"] == 12 + rows["two"]["runs"]
    assert rows["all"]["p50_s"] <= rows["all"]["p95_s"]
    assert runs_by_application(result, until_s=0.0) == {}
    np.testing.assert_array_equal(staged(tmp_path, tables, head).run().runs.ended_s, result.runs.ended_s)


def test_units_of_a_graph_run_on_their_own_models(tmp_path):
    """Also what is known of them: a unit is served at the rate of its model, and its calls fit that model's context."""
    graph = DemandGraph(
        "pair",
        {"plan": Backend("llm", "x"), "write": Backend("llm", "x")},
        [RunRecord((Step("plan", -1, 100.0, 50.0 + each), Step("write", 0, 900.0, 200.0))) for each in range(20)],
    )
    (tmp_path / "graph.json").write_bytes(graph.to_json())
    slow = HEAD[HEAD.index("[[profiles]]") : HEAD.index("[classes.iw]")].replace('"m"', '"n"')
    slow = slow.replace("decode = { a_s = 0.01 }", "decode = { a_s = 0.05 }")
    head = HEAD.replace("[gpus.g]", "[models.n]\ncontext_tokens = 1000\n[gpus.g]").replace(
        "[classes.iw]", slow + "[classes.iw]"
    )
    head = head.replace("[classes.iw]", '[policies]\nordering = "hermes"\n[classes.iw]')
    tables = RUNS + 'graph = "graph.json"\nmodels = { write = "n" }\ndeadline_factor = [1.0]\n'
    made = staged(tmp_path, tables, head)
    assert {unit: each.name for unit, each in made.runs.applications[0].units.items()} == {"plan": "m", "write": "n"}
    models = np.array(made.cluster.models)[made.requests.model]
    assert models.tolist() == ["m"] * 12 + ["n"] * 12 or sorted(models) == ["m"] * 12 + ["n"] * 12
    of = made.requests.prompt_tokens + made.requests.output_tokens
    assert (of[models == "n"] <= 1000).all()
    assert made.clipped == 12
    known = made.runs.applications[0].graph
    rates = known.arrays.rate[[known.units["write"], known.units["plan"]], 2]  # of an output token
    assert rates[0] > 4 * rates[1]
    result = made.run()
    assert runs_by_application(result)["pair"]["ended"] == 12
    alone_s = made.runs.runs[0].due_in_s
    assert 200 * 0.05 < alone_s < 200 * 0.05 + 3.0
    exact = staged(tmp_path, '[predictions]\nruns = "exact"\n' + tables, head)
    assert np.isfinite(exact.run().runs.ended_s).all()
    for wrong, message in (
        ("{ write = 'o' }", "there is no model 'o'"),
        ("{ other = 'n' }", "no LLM unit of that name"),
    ):
        with pytest.raises(ScenarioError, match=message):
            staged(
                tmp_path,
                RUNS + f"graph = {_inline(graph)}\nmodels = {wrong}\n",
                head,
            )


def _inline(graph: DemandGraph) -> str:
    text = to_toml({"graph": [json.loads(graph.to_json())]})
    values = tomllib.loads(text)["graph"][0]
    return to_toml({"x": [{"graph": values}]}).partition("graph = ")[2].strip()


def test_a_scenario_of_runs_alone_is_written_and_read_again(tmp_path):
    head = HEAD.replace("[classes.iw]", '[policies]\nordering = "hermes"\n[classes.iw]')
    made = staged(tmp_path, RUNS.replace("runs = 12", 'runs = 60\nsuite = "mix"'), head)
    assert len({each.name for each in made.runs.applications}) >= 8
    assert all(each.graph is not None and not each.graph.whole for each in made.runs.applications)
    loaded = load_scenario(tmp_path / "scenario.toml")
    again = tmp_path / "again.toml"
    again.write_text(to_toml(loaded.model_dump(mode="json", exclude_defaults=True)))
    assert load_scenario(again) == loaded
    calls = (made.requests.run >= 0).sum()
    assert expected_calls(loaded) == pytest.approx(calls, rel=0.5)
    result = made.run()
    assert runs_by_application(result)["all"]["ended"] == 60


@pytest.mark.parametrize(("known", "graph"), [("exact", False), ("none", False), ("whole", True), ("unrefined", True)])
def test_what_is_known_of_runs(tmp_path, known, graph):
    head = HEAD.replace("[classes.iw]", '[policies]\nordering = "hermes"\nlate_runs_last = true\n[classes.iw]')
    tables = f'[predictions]\nruns = "{known}"\nrecorded_runs = 40\nbuckets = 5\nworst = 0.9\n'
    made = staged(tmp_path, tables + RUNS.replace("runs = 12", 'runs = 6\nsuite = "CC"'), head)
    (one,) = made.runs.applications
    assert (one.graph is not None) == graph
    assert made.runs.exact == (known == "exact")
    assert made.runs.reading == Reading(5, 0.9, late_last=True)
    if graph:
        assert one.graph.whole == (known == "whole")
    assert np.isfinite(made.run().runs.ended_s).all()


def test_runs_begin_as_a_trace_has_it(tmp_path):
    (tmp_path / "rows").write_text("Timestamp,Model,Request tokens,Response tokens\n0,a,9,9\n30,a,9,9\n40,a,9,9\n")
    tables = RUNS.replace("runs = 12", 'suite = "EV"\nruns = 3\nwindow_h = 1\nfrom_h = 1')
    made = staged(tmp_path, tables + 'arrivals = { file = "rows", format = "burstgpt" }\n')
    assert [each.began_s for each in made.runs.runs] == pytest.approx([3600, 3600 + 2700, 7200], abs=0.01)


@pytest.mark.parametrize(("tables", "message"), [
    (RUNS, r"applications\[0\]: give suite or graph, and not both"),
    (RUNS + 'suite = "XX"\n', r"applications\[0\].suite: must be one of EV, .*, LLMR, mix, not 'XX'"),
    (RUNS.replace("runs = 12", 'suite = "EV"'), r"applications\[0\]: give runs or runs_per_h, and not both"),
    (RUNS + 'suite = "mix"\nname = "x"\n', r"the mix has the names of the suite"),
    (RUNS.replace('"m"', '"n"') + 'suite = "CC"\n', r"applications\[0\].model: there is no model 'n'"),
    (RUNS.replace('"iw"', '"x"') + 'suite = "EV"\n', r"applications\[0\].slo_class: there is no class 'x'"),
    (RUNS + 'suite = "EV"\nregions = { east = 0 }\n', r"applications\[0\].regions: all shares are 0"),
    (RUNS + "graph = { version = 1 }\n", r"applications\[0\].graph: is not a demand graph: .*application"),
    (RUNS + 'graph = "none.json"\n', r"applications\[0\].graph: none.json: No such file"),
    (RUNS + f"graph = {_inline(DemandGraph('x', GRAPH.units))}\n", r"applications\[0\].graph: has no records of runs"),
    (f'{RUNS}suite = "EV"\nname = "a"\n{RUNS}suite = "CC"\nname = "a"\n', r"\[1\]: another application has the name 'a'"),
    (RUNS + 'suite = "EV"\narrivals = { file = "no", format = "azure" }\n', r"applications\[0\].arrivals.file: .*no"),
])  # fmt: skip
def test_a_wrong_table_is_named(tmp_path, tables, message):
    with pytest.raises(ScenarioError, match=message):
        staged(tmp_path, tables)


def test_calls_longer_than_the_context_are_refused_or_cut(tmp_path):
    tables = RUNS + 'suite = "DM"\n'
    short = HEAD.replace("context_tokens = 4096", "context_tokens = 1500")
    assert staged(tmp_path, tables, short).clipped > 0
    with pytest.raises(
        ScenarioError, match=r"applications\[0\]: a call has .* tokens, m takes 1500: set demand.too_long"
    ):
        staged(tmp_path, tables, short.replace('too_long = "clip"\n', ""))


CHAIN = DemandGraph(
    "chain",
    {"write": Backend("llm", "m"), "test": Backend("container", "python"), "see": Backend("dnn", "vit")},
    [
        RunRecord((
            Step("write", -1, 100.0, 600.0 + each), Step("test", 0, duration_s=2.0, parallelism=2),
            Step("write", 1, 100.0, 500.0), Step("see", 2, duration_s=1.0), Step("write", 3, 50.0, 20.0),
        ))
        for each in range(20)
    ],
)  # fmt: skip
COLD = "\n[backends.container]\nstart_s = 3.0\nkeep_alive_s = 5.0\n[backends.dnn]\nstart_s = 1.0\ncapacity = 1\n"
COLD += "starts_s = { vit = 4.0 }\nkeep_alive_s = 5.0\n"


@pytest.mark.parametrize("by", ["lru", "epwq", "hermes"])
def test_units_wait_for_cold_backends_unless_these_are_prewarmed(tmp_path, by):
    graph = f"graph = {_inline(CHAIN)}"
    tables = RUNS.replace("runs = 12", f"runs = 6\nwindow_h = 0.5\n{graph}")
    cold = f'[policies]\nprewarming = "{by}"\n{COLD}'
    warm, made = staged(tmp_path, tables).run(), staged(tmp_path, tables + cold).run()
    counters = made.counters
    for kind, calls in (("container", 12), ("dnn", 6)):
        assert sum(counters[f"{kind}_{fate}"] for fate in ("hit", "late", "miss")) == calls
    delay_s = float((made.runs.completion_s - warm.runs.completion_s).mean())
    if by in ("lru", "epwq"):
        assert delay_s == pytest.approx(3.0 + 4.0, abs=0.5)
        assert counters["container_warmed"] == counters["dnn_warmed"] == 0
        assert (counters["container_miss"], counters["container_waited_s"]) == (12, 36)
        assert counters["dnn_miss"] == 6
    else:
        assert delay_s < 2.0
        assert counters["dnn_hit"] + counters["dnn_late"] == counters["dnn_used"] == 6
        assert counters["container_warmed"] == counters["container_used"] + counters["container_wasted"]
        assert counters["container_used"] >= 10


@pytest.mark.parametrize("by", ["lru", "epwq", "hermes"])
def test_system_prompts_are_cached_and_prewarmed(tmp_path, by):
    head = HEAD.replace("kv_tokens = 16000", "kv_tokens = 6000\nprefix_caching = true").replace(
        'regions = ["east", "west"]', 'regions = ["east"]'
    )
    runs = RUNS.replace("runs = 12", 'runs = 20\nsuite = "mix"\nprompts = 3\nwindow_h = 0.2')
    policies = f'[policies]\nrouting = "least_delay"\nordering = "hermes"\nprewarming = "{by}"\n'
    made = staged(tmp_path, f"{runs}{policies}", head)
    versions = {each.prompts for each in made.runs.runs}
    assert versions == {0, 1, 2}
    result = made.run()
    counters, shared = result.counters, np.diff(made.requests.prefix_first)
    assert (shared > 0).mean() > 0.9
    assert 0 < counters["prefix_hit_tokens"] <= counters["prefix_queried_tokens"]
    if by == "lru":
        assert "prefix_warmed" not in counters
        return
    assert counters["prefix_used"] + counters["prefix_wasted"] <= counters["prefix_warmed"]
    none = staged(tmp_path, f"{runs}{policies}prewarm_share = 0\n", head)
    assert none.run().counters["prefix_warmed"] == 0
    blind = staged(tmp_path, f"{runs}{policies.replace('least_delay', 'round_robin')}", head)
    assert blind.run().counters["prefix_warmed"] == 0, "calls would go anywhere"
    assert counters["prefix_used"] > 0


def test_prompts_that_cannot_be_shared_are_refused(tmp_path):
    runs = RUNS.replace("runs = 12", f"runs = 2\nprompts = 2\ngraph = {_inline(CHAIN)}")
    with pytest.raises(ScenarioError, match="prompts are those of the suite"):
        staged(tmp_path, runs)
