"""Sessions of a trace by its prompts, and the experiment on a small trace."""

import json

import numpy as np
import pytest

from controlplane.experiments.preserve_routing import MOONCAKE
from controlplane.experiments.registry import EXPERIMENTS
from controlplane.experiments.sessions import ROUTERS, sessions_of

SYSTEM = 0


def test_a_request_continues_the_session_whose_prompt_it_has_whole():
    prompts = [
        [SYSTEM, 1, 2],
        [SYSTEM, 11, 12],  # another conversation under the same system prompt
        [SYSTEM, 1, 3, 4],
        [SYSTEM, 1, 3, 5, 6],
        [SYSTEM, 11, 13],
        [SYSTEM],
    ]
    first = np.cumsum([0, *map(len, prompts)])
    hashes = np.array([block for prompt in prompts for block in prompt])
    assert sessions_of(first, hashes).tolist() == [0, 1, 0, 0, 1, 2]


def test_the_experiment_compares_routers(tmp_path):
    lines = []
    for at in range(60):
        talk, call = at % 6, at // 6
        blocks = [SYSTEM, *(100 * (talk + 1) + each for each in range(call + 2))]
        lines.append(
            {"timestamp": 400 * at, "input_length": 512 * len(blocks) - 20, "output_length": 20, "hash_ids": blocks}
        )
    path = tmp_path / MOONCAKE
    path.parent.mkdir()
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    experiment = EXPERIMENTS["sessions"]
    result = experiment.run(experiment.settings({"data": tmp_path}), lambda *_: None)
    assert result["about"] == {"requests": 60, "sessions": 6, "continued": 1.0}
    assert {row["router"] for row in result["rows"]} == set(ROUTERS)
    busiest = {row["busiest"] for row in result["rows"] if row["router"] == "sticky"}
    assert [*busiest] == [pytest.approx(2 / 6 * 4, abs=1e-3)]  # six sessions on four instances
    with pytest.raises(ValueError, match="mooncake"):
        experiment.run(experiment.settings({"data": tmp_path / "nothing"}), lambda *_: None)
