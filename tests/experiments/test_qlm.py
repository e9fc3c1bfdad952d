"""`manage.py reproduce qlm` on a small fleet: every part is run, and what is compared is what was measured."""

import json
from io import StringIO

import numpy as np
import pytest
from django.core.management import call_command
from rich.console import Console

from controlplane.experiments.qlm import evaluation, systems
from controlplane.experiments.qlm.evaluation import PARTS, QLM
from controlplane.experiments.qlm.systems import (
    BATCH_2,
    INTERACTIVE,
    MEGA_TOKENS,
    MODELS,
    Stream,
    draw,
    measured,
    one_model,
    policies_of,
)


@pytest.fixture
def small(monkeypatch):
    for name, value in {"ARRIVING_S": 4.0, "ARRIVING_B_S": 4.0, "WAITING_S": 3.0, "WAITING_B_S": 2.0}.items():
        monkeypatch.setattr(evaluation, name, value)
    monkeypatch.setattr(evaluation, "MIX_VARIATIONS", (3.0,))
    for name, values in {
        "single": (0.5, 1.5), "multi": (0.2,), "few": (0.2,), "mega": (0.2,), "gpus": (0.5,), "size": (0.0, 60.0),
        "delta": (0.25,), "mixes": (1.3,),
    }.items():  # fmt: skip
        monkeypatch.setitem(PARTS, name, PARTS[name] | {"values": values})
    systems.full_per_s.cache_clear()
    monkeypatch.setattr(systems, "AT_ONCE", 200)
    monkeypatch.setattr(systems, "MIX_AT_ONCE", 200)
    monkeypatch.setattr(systems, "MIX_S", 4.0)


@pytest.mark.nightly
def test_every_part_is_run_and_compared(small):
    out = StringIO()
    call_command("reproduce", "qlm", "--scale", "0.04", "--seeds", "1", "--json", stdout=out)
    result = json.loads(out.getvalue())
    assert {row["part"] for row in result["rows"]} == set(PARTS)
    for row in result["rows"]:
        assert 0.0 <= row["attainment"] <= 1.0
        assert row["goodput"] <= row["throughput"]
        assert row["goodput"] == pytest.approx(row["throughput"] * row["attainment"], rel=1e-2)
    of = {(row["part"], row["varied"], row["system"]): row for row in result["rows"]}
    assert of["single", 1.5, "shepherd"]["throughput"] < of["single", 1.5, "qlm"]["throughput"]
    assert of["few", 0.2, "qlm"]["swaps"] > 0  # five models on three nodes
    assert all(of["single", load, "fcfs"]["reorderings"] == 0 for load in (0.5, 1.5))
    waiting = [of["size", waiting_s, "qlm"]["most_waiting"] for waiting_s in (0.0, 60.0)]
    assert waiting[0] < waiting[1]
    compared = {each.measure: each.ours for each in QLM.compare(result)}
    gains = [of["single", load, "qlm"]["attainment"] - of["single", load, "edf"]["attainment"] for load in (0.5, 1.5)]
    assert compared["requests in time over EDF, one model, points, at the most"] == pytest.approx(max(gains))
    console = Console(file=StringIO(), width=250)
    QLM.show(console, result)
    assert all(part["title"] in console.file.getvalue() for part in PARTS.values())


def test_the_workload_is_what_it_says():
    streams = [Stream(INTERACTIVE, 100.0), Stream(BATCH_2, 0.0, waiting=500)]
    requests = draw(streams, ["m"], 50.0, 1, mega_share=0.1)
    waiting = requests.slo_class.codes == BATCH_2
    assert waiting.sum() == 500
    assert (requests.arrival_s[waiting] == 0.0).all()
    assert (~waiting).sum() == pytest.approx(5000, rel=0.05)
    mega = requests.prompt_tokens + requests.output_tokens >= MEGA_TOKENS[0]
    assert mega.mean() == pytest.approx(0.1, abs=0.02)
    assert np.unique(requests.predicted_tokens).size == 2  # no output is known beforehand


def test_systems_differ_in_what_they_are_named_for():
    requests = draw([Stream(INTERACTIVE, 10.0)], ["m"], 10.0, 1)
    vicuna = MODELS["vicuna_a100"]
    fleet = [(vicuna, "A100")] * 3
    scenarios = {
        name: one_model(fleet, name, requests)[0]
        for name in {*PARTS["single"]["systems"], *PARTS["without"]["systems"]}
    }
    policies = {name: policies_of(name, [vicuna], requests) for name in scenarios}
    assert policies["qlm"] == {"ordering": "qlm", "eviction_limit": systems.EVICTIONS}
    assert policies["without-eviction"]["eviction_limit"] == 0
    assert policies["shepherd"]["batching"]["mode"] == "dynamic"
    assert policies["shepherd+evictions"] == policies["qlm"] | {"reordering": "shepherd"}
    ruled = {each["eviction_limit"] for each in policies.values() if "reordering" in each}
    assert ruled == {systems.EVICTIONS}, "a rule that replaces the search evicts as it does"
    assert policies["edf"] == {"ordering": "deadline"}
    assert len(scenarios["without-balance"].models) == 3
    assert all(group.takes_all for group in scenarios["without-pulling"].fleet)
    assert not any(group.takes_all for group in scenarios["qlm"].fleet)


def test_the_paper_s_edf_swaps_as_it_pleases(monkeypatch):
    """It is another system than FCFS and than EDF that swaps on demand: it changes models far more often."""
    monkeypatch.setattr(systems, "MIX_S", 20.0)
    monkeypatch.setattr(systems, "MIX_AT_ONCE", 200)
    lines = {
        case.about["system"]: measured(case.simulate(1))
        for case in systems.mixes(["three models"], [1.6], [1.0], 0.5)
        if case.about["system"] in ("edf", "edf-swapping")
    }
    assert lines["edf-swapping"]["swaps"] > 2 * lines["edf"]["swaps"]
    assert lines["edf-swapping"]["attainment"] != lines["edf"]["attainment"]


@pytest.mark.parametrize("variation", [1.0, 3.0])
def test_gaps_vary_as_asked(variation):
    moments = systems.arrivals(50.0, variation, np.random.default_rng(1))
    gaps = np.diff(moments)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.15)
    assert moments.size == pytest.approx(50.0 * systems.MIX_S, rel=0.15)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["short answers", "three models"])
def test_where_deadlines_differ_every_system_is_another_one(monkeypatch, name):
    monkeypatch.setattr(systems, "MIX_S", 60.0)
    came = {}
    for case in systems.mixes([name], [2.0], [1.0], 0.5):
        line = measured(case.simulate(1))
        key = line["attainment"], line["ttft_p99_s"], line["goodput"]
        came.setdefault(key, []).append(case.about["system"])
    alike = [systems for systems in came.values() if len(systems) > 1]
    # Of instances that are alike the one that is free first is the one that is done first.
    assert alike == ([["edf+evictions", "edf-earliest-completion+evictions"]] if name == "short answers" else [])
