"""Prewarming as an experiment, on few runs: every part, what is cold in it, and its figures beside the paper's."""

import io

import pytest
from rich.console import Console

from controlplane.experiments.experiment import mean_of
from controlplane.experiments.hermes_prewarming import DATA, HERMES_PREWARMING


def result_of(tmp_path, part, scale, **more):
    options = {"scale": scale, "seeds": 1, "parts": part, "data": tmp_path, **more}
    result = HERMES_PREWARMING.run(HERMES_PREWARMING.settings(options), lambda *_: None)
    console = Console(file=io.StringIO(), width=240)
    HERMES_PREWARMING.show(console, result)
    assert "LRU" in console.file.getvalue()
    return result, {(row["setting"], row["system"]): row for row in result["rows"]}


@pytest.mark.nightly
def test_adapters_are_loaded_before_their_requests(tmp_path):
    result, rows = result_of(tmp_path, "lora", 0.05, instances=2)
    of = {system: row for (_, system), row in rows.items()}
    assert list(of) == ["LRU", "EPWQ", "Hermes"]
    for row in of.values():
        assert row["hits"] + row["in_memory"] + row["not_loaded"] == pytest.approx(1.0, abs=1e-3)
        assert 0 < row["came_hits"] < 1
    assert of["LRU"]["warmed"] == 0
    assert min(of["EPWQ"]["used"], of["Hermes"]["used"]) > 0
    assert of["Hermes"]["not_loaded"] < of["LRU"]["not_loaded"]
    (comparison,) = HERMES_PREWARMING.compare(result)
    assert (comparison.paper, comparison.section) == (0.211, "5.4")


@pytest.mark.nightly
def test_system_prompts_are_cached_before_their_calls(tmp_path):
    result, rows = result_of(tmp_path, "kv", 0.04, prompts=2)  # with more of them few are seen twice
    for gb in (8, 16, 32):
        of = {system: rows[f"{gb} GB", system] for system in ("LRU", "EPWQ", "Hermes")}
        assert of["LRU"]["warmed"] == 0
        assert of["LRU"]["came_hits"] <= of["Hermes"]["came_hits"]
        assert of["LRU"]["hits"] <= of["Hermes"]["hits"] <= 1
    assert rows["8 GB", "LRU"]["hits"] < rows["8 GB", "Hermes"]["hits"]
    assert rows["8 GB", "LRU"]["came_hits"] < rows["32 GB", "LRU"]["came_hits"]
    figures = {each.measure: each.ours for each in HERMES_PREWARMING.compare(result)}
    assert figures["hits of system prompts, Hermes against LRU, at most"] > 0
    assert len(figures) == 4


def test_a_smaller_k_makes_containers_and_models_warm_more_often_and_idle_longer(tmp_path, monkeypatch):
    named, part = ("LRU", "K = 0.1", "K = 0.9"), DATA["parts"]["k"]
    settings = {name: each for name, each in part["settings"].items() if name != "adapters"}
    monkeypatch.setitem(DATA, "knob", {name: DATA["knob"][name] for name in named})
    monkeypatch.setitem(part, "settings", settings)
    result, rows = result_of(tmp_path, "k", 0.08)
    for setting in settings:
        lru, small, large = (rows[setting, name] for name in named)
        assert small["waited_s"] < large["waited_s"] <= lru["waited_s"]
        assert small["idle_s"] > large["idle_s"]
        assert small["mean_s"] < lru["mean_s"]
    assert HERMES_PREWARMING.compare(result) == []


def test_a_mean_leaves_out_seeds_with_nothing_to_measure():
    rows = [{"waste": 0.25, "runs": 3}, {"waste": None, "runs": 4}, {"waste": 0.75, "runs": 4}]
    assert mean_of(rows) == {"waste": 0.5, "runs": 4}
    assert mean_of([{"waste": None}, {"waste": None}]) == {"waste": None}
