"""A living fleet as a begin: what its gateway cannot have seen is as the simulator would have it."""

import tomllib
from pathlib import Path

import pytest

from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.staging import stage
from scheduling.simulation.staging.state import Forked, forked_state
from tests.scheduling.simulation.test_scenario import RIGHT

SOURCE = Path("scenario")
INSTANCE = {
    "name": "m-east-1", "model": "m", "region": "east", "gpu": "g", "state": "READY", "since_s": -100.0, "ends_s": None,
    "swap_group": "", "round_trips": [0.0] * 5,
}  # fmt: skip
RUNNING = {
    "request_id": "1", "model": "m", "region": "east", "served_in": "east", "slo_class": "iw", "arrival_s": -0.02,
    "prompt_tokens": 200, "predicted_tokens": 50, "sequences": 1, "attempts": 1, "instance": 0, "placed_s": -0.01,
    "streamed": False, "output_tokens": 0, "expected_prompt": 200, "expected_tokens": 250, "ahead": 90, "tenant": "acme",
}  # fmt: skip


def placed(**values):
    scenario = check_scenario(tomllib.loads(RIGHT), SOURCE)
    staged = stage(scenario, SOURCE, 1)
    forked = Forked(instances=[INSTANCE], running=[RUNNING | values], waiting=[], endpoints=[])
    state = forked_state(forked, scenario, staged.cluster, list(staged.names.tenants), 1)
    [one] = [each for instance in state.instances for each in instance.requests]
    return one


@pytest.mark.parametrize(("values", "ahead"), [
    ({}, None),
    ({"ahead": None}, None),
    ({"streamed": True, "output_tokens": 0}, None),
    ({"streamed": True, "output_tokens": 7}, 90),
    ({"streamed": True, "output_tokens": 7, "ahead": None}, 6),
])  # fmt: skip
def test_a_request_is_in_the_look_ahead_map_once_it_has_a_token(values, ahead):
    """It enters with its first token: one that stood there before would stand there twice, and the map would not end."""
    assert placed(**values).ahead == ahead
