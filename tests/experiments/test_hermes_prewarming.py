"""Prewarming of adapters as an experiment, on few runs."""

import io

import pytest
from rich.console import Console

from controlplane.experiments.hermes_prewarming import HERMES_PREWARMING


def test_prewarming_loads_adapters_before_their_requests(tmp_path):
    settings = HERMES_PREWARMING.settings(
        {"scale": 0.05, "seeds": 1, "instances": 2, "parts": "lora", "data": tmp_path}
    )
    result = HERMES_PREWARMING.run(settings, lambda *_: None)
    of = {row["system"]: row for row in result["rows"]}
    assert list(of) == ["LRU", "EPWQ", "Hermes"]
    for row in of.values():
        assert row["hits"] + row["in_memory"] + row["not_loaded"] == pytest.approx(1.0, abs=1e-3)
    assert of["LRU"]["warmed"] == 0
    assert min(of["EPWQ"]["used"], of["Hermes"]["used"]) > 0
    assert of["Hermes"]["not_loaded"] < of["LRU"]["not_loaded"]
    (comparison,) = HERMES_PREWARMING.compare(result)
    assert (comparison.paper, comparison.section) == (0.211, "5.4")
    console = Console(file=io.StringIO(), width=160)
    HERMES_PREWARMING.show(console, result)
    assert "EPWQ" in console.file.getvalue()
