"""What it costs to have KV on a GPU again."""

import numpy as np
import pytest

from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.fleet.kv_cost import eviction_cost_s, regain_s

PREFILL = (0.02, 0.01, 1e-4, 1e-8)
"""1,000 tokens in 0.12 s, 400 in 0.0516 s, and no fewer than 20 ms."""


@pytest.mark.parametrize(
    ("tokens", "offloaded", "restore_s", "per_token_s", "expected_s", "restored"),
    [
        (1000, 0, 0.0, 0.0, 0.12, 0),
        (1000, 1000, 0.002, 2e-5, 0.022, 1000),
        (1000, 600, 0.002, 2e-5, 0.002 + 0.012 + 0.0516, 600),
        (1000, 600, 0.002, 1e-3, 0.12, 0),
        (1000, 1000, 0.0, np.inf, 0.12, 0),
        (50, 40, 0.002, 2e-5, 0.02, 0),  # no prefill is shorter than that of the 10 others
        (0, 0, 0.002, 2e-5, 0.0, 0),
    ],
)
def test_the_cheaper_of_restore_and_recompute(tokens, offloaded, restore_s, per_token_s, expected_s, restored):
    found = regain_s(*PREFILL, restore_s, per_token_s, float(tokens), float(offloaded))
    assert found == (pytest.approx(expected_s), restored)


@pytest.mark.parametrize(
    ("offload", "instances", "expected_s"),
    [
        ((0, 0.0, 0.0), 1, 0.12),
        ((5000, 0.002, 2e-5), 1, 0.022),
        ((5000, 0.002, 2e-5), 2, 0.071),  # half of the time it returns to the other
        ((999, 0.002, 2e-5), 1, 0.12),  # does not fit there
    ],
)
def test_an_evicted_request_loses_the_restore_where_its_kv_is(offload, instances, expected_s):
    fleet, endpoints = allocate_fleet(3), allocate_endpoints(1, 3)
    fleet.endpoint[:instances], fleet.accepting[:instances] = 0, 1
    fleet.profile[:] = (*PREFILL, 0.02, 0.0, 0.0)
    fleet.offload[:] = offload
    index_members(fleet, endpoints)
    assert eviction_cost_s(fleet, endpoints, 0, 1000.0) == pytest.approx(expected_s)
