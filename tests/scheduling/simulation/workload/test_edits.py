"""Edits of demand: how many requests there are after them, when they come, and that equal seeds give equal requests."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduling.simulation.workload.columns import Coded, Workload, calls_of
from scheduling.simulation.workload.edits import Factor, LengthFactor, More, Retarget, Scope, Shift, edited, merged

HORIZON_S = 3600.0
EAST = Scope(regions=frozenset({"east"}))


def workload(count: int = 4000, seed: int = 1) -> Workload:
    random = np.random.default_rng(seed)

    def coded(*names: str) -> Coded:
        return Coded(random.integers(0, len(names), count).astype(np.int16), list(names))

    return Workload(
        np.sort(random.uniform(0, HORIZON_S, count)),
        random.integers(1, 900, count).astype(np.int32),
        random.integers(1, 300, count).astype(np.int32),
        coded("a", "b"),
        coded("east", "west"),
        coded("iw"),
        coded("t"),
    )


def rows(made: Workload) -> list[tuple]:
    """Each request without its time."""
    names = [[column.names[code] for code in column.codes] for column in (made.model, made.region, made.tenant)]
    return list(zip(made.prompt_tokens.tolist(), made.output_tokens.tolist(), *names, strict=True))


def plain_factor(edit: Factor, at_s: float) -> float:
    """The factor at a moment, as the sentence says it."""
    if not edit.from_s <= at_s < edit.until_s:
        return 1.0
    if edit.ramp_s == 0:
        return edit.by
    share = min(1.0, (at_s - edit.from_s) / edit.ramp_s, (edit.until_s - at_s) / edit.ramp_s)
    return 1.0 + (edit.by - 1.0) * max(0.0, share)


@given(st.floats(0, 5), st.floats(0, 3000), st.floats(1, 3000), st.sampled_from([0.0, 60.0, 600.0]), st.integers(0, 9))
@example(1e-274, 0.0, 1.0, 0.0, 0)
def test_a_factor_gives_as_many_requests_as_it_says(by, from_s, lasts_s, ramp_s, seed):
    edit = Factor(Scope(), by, from_s, from_s + lasts_s, ramp_s)
    before = workload()
    plain = [plain_factor(edit, at_s) for at_s in before.arrival_s]
    np.testing.assert_allclose(edit.of(before.arrival_s), plain, atol=1e-12)
    made = edited(before, [edit], seed=seed, horizon_s=HORIZON_S)
    expected = edit.of(before.arrival_s)
    spread = np.sqrt((np.modf(expected)[0] * (1 - np.modf(expected)[0])).sum())
    # Where less than one is expected, a few may still come.
    assert abs(len(made) - expected.sum()) <= 6 * spread + 3
    made.check()
    assert made.arrival_s.max(initial=0) < HORIZON_S
    # Nothing is invented: each is a request that there was.
    assert set(rows(made)) <= set(rows(before))


def test_outside_its_scope_nothing_changes():
    before = workload()
    made = edited(before, [Factor(EAST, 3.0), LengthFactor(EAST, 2.0, 0.5)], seed=1, horizon_s=HORIZON_S)
    others = [made.select(made.region.codes == 1), before.select(before.region.codes == 1)]
    assert rows(others[0]) == rows(others[1])
    np.testing.assert_array_equal(others[0].arrival_s, others[1].arrival_s)
    assert (made.region.codes == 0).sum() == 3 * (before.region.codes == 0).sum()


@given(st.floats(-5000, 5000))
def test_a_shift_keeps_every_request_within_the_horizon(by_s):
    before = workload()
    made = edited(before, [Shift(EAST, by_s)], seed=1, horizon_s=HORIZON_S)
    made.check()
    assert sorted(rows(made)) == sorted(rows(before))
    moved = np.sort((before.arrival_s[before.region.codes == 0] + by_s) % HORIZON_S)
    np.testing.assert_allclose(made.arrival_s[made.region.codes == 0], moved)


def test_lengths_are_rounded_and_never_none():
    made = edited(workload(), [LengthFactor(Scope(), 0.001, 2.0)], seed=1)
    assert set(made.prompt_tokens) == {1}
    assert (made.output_tokens == 2 * workload().output_tokens).all()


def test_equal_seeds_give_equal_requests_and_others_do_not():
    edits = [Factor(Scope(), 1.5), Shift(EAST, 60.0)]
    one, again, other = (edited(workload(), edits, seed=seed, horizon_s=HORIZON_S) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.arrival_s, again.arrival_s)
    assert rows(one) == rows(again)
    assert len(one) != len(other) or rows(one) != rows(other)


def test_another_tenant_is_added():
    other = workload(50, 7)
    other.tenant.names[0] = "new"
    made = edited(workload(), [More(other)], seed=1, horizon_s=HORIZON_S)
    assert len(made) == 4050
    assert sorted(rows(made)) == sorted(rows(workload()) + rows(other))


def test_weights_share_a_public_name_and_move_as_few_requests_as_they_can():
    asked = Coded(np.where(np.arange(4000) % 4, 0, 1).astype(np.int32), ["chat", ""])
    before = replace(workload(), model=Coded(np.zeros(4000, np.int32), ["m"]), asked=asked)
    made = edited(before, [Retarget("chat", {"m": 60.0, "n": 20.0, "o": 20.0})], seed=1)
    chat = made.asked.codes == 0
    shares = [float(np.mean(made.model.codes[chat] == at)) for at in range(3)]
    assert made.model.names == ["m", "n", "o"]
    np.testing.assert_allclose(shares, [0.6, 0.2, 0.2], atol=0.03)
    assert not made.model.codes[~chat].any()
    again = edited(made, [Retarget("chat", {"m": 60.0, "n": 40.0})], seed=2)
    gone = (made.model.codes == 2) & chat
    assert np.mean(again.model.codes[gone] == 1) > 0.9
    assert np.mean(again.model.codes[chat & ~gone] == made.model.codes[chat & ~gone]) > 0.95
    assert rows(edited(workload(), [Retarget("chat", {"m": 1.0})], seed=1)) == rows(workload()), "none asks for it"


def test_prefixes_stay_with_their_requests():
    blocks = {"prefix_first": np.array([0, 2, 3], np.int64), "prefix_hashes": np.array([7, 8, 9], np.int64)}
    with_prefix = replace(workload(2), **blocks, prefix_block_tokens=512)
    made = merged(workload(3), with_prefix)
    assert made.prefix_first.tolist() == [0, 0, 0, 0, 2, 3]
    assert made.prefix_hashes.tolist() == [7, 8, 9]
    doubled = edited(with_prefix, [Factor(Scope(), 2.0)], seed=1)
    runs = {tuple(doubled.prefix_hashes[a:b]) for a, b in pairwise(doubled.prefix_first)}
    assert {(7, 8), (9,)} < runs
    assert len(runs) == 4, "copies share nothing that only one request has"
    with pytest.raises(ValueError, match="different sizes"):
        merged(with_prefix, replace(with_prefix, prefix_block_tokens=16))


def test_edits_are_of_whole_runs_and_keep_what_different_runs_share():
    names = ["acme"] * 5, ["a"] * 5, ["r1", "r1", "r2", "", "r2"], [""] * 5, [None] * 5, [1000.0] * 5, ["done"] * 5
    blocks = {"prefix_first": np.array([0, 2, 4, 5, 5, 6]), "prefix_hashes": np.array([1, 2, 1, 2, 1, 1])}
    recorded = replace(workload(5), calls=calls_of(*names), **blocks, prefix_block_tokens=16)
    made = merged(edited(recorded, [Factor(Scope(), 3.0), Shift(Scope(), 2.0)], seed=1), recorded)
    lengths = sorted(np.bincount(made.calls.run[made.calls.run >= 0]).tolist())
    assert lengths == [2] * (3 * 2 + 2)
    runs = [np.flatnonzero(made.calls.run == number) for number in range(8)]
    assert [made.calls.step[rows].tolist() for rows in runs] == [[1, 2]] * 8
    began_s = {number: recorded.arrival_s[recorded.calls.run == number] for number in (0, 1)}
    gaps = {float(round(np.ptp(each), 9)) for each in began_s.values()}
    assert {float(round(np.ptp(made.arrival_s[rows]), 9)) for rows in runs} == gaps, (
        "the calls of a run keep their gaps"
    )
    hashes, counts = np.unique(made.prefix_hashes, return_counts=True)
    assert dict(zip(hashes.tolist(), counts.tolist(), strict=True))[1] == 4 * 4, "what both runs have, all copies share"
    assert sorted(counts[hashes != 1].tolist()) == [2, 2, 4], "what one run has, no copy shares"
