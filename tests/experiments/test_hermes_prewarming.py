"""Prewarming as an experiment, on few runs: every part, what is cold in it, and its figures beside the paper's."""

import io

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
