"""Warm containers and DNN models: what a call finds, what leaves, and what is counted."""

import math

from hypothesis import given
from hypothesis import strategies as st

from scheduling.applications.warm_pool import WarmPool, WarmTerms

START_S = 2.0


def test_a_cold_backend_is_started_and_a_kept_one_is_warm():
    pool = WarmPool(2)
    first = pool.use("a", START_S, 10.0)
    assert first.ready_s == 12.0
    second = pool.use("a", START_S, 11.0)
    assert second is not first, "a container serves one call at a time"
    pool.release(first, 20.0)
    assert pool.use("a", START_S, 25.0) is first
    assert pool.counts == {"hit": 1, "late": 0, "miss": 2, "warmed": 0, "used": 0, "wasted": 0}
    assert (pool.waited_s, pool.idle_s(26.0)) == (4.0, 5.0)


def test_a_prewarmed_backend_is_used_late_or_wasted():
    pool = WarmPool(3, keep_alive_s=10.0)
    (early,) = pool.warm("a", START_S, 0.0)
    assert pool.warm("a", START_S, 1.0) == [], "one is on its way"
    assert pool.use("a", START_S, 1.5) is early
    assert pool.waited_s == 0.5
    assert len(pool.warm("a", START_S, 2.0)) == 1
    assert pool.warm("a", START_S, 3.0) == []
    pool.expire(14.1)
    assert pool.backends == [early], "ten seconds after it was last wanted, or became warm"
    assert pool.counts == {"hit": 0, "late": 1, "miss": 0, "warmed": 2, "used": 1, "wasted": 1}
    pool.release(early, 15.0)
    pool.expire(25.5)
    assert pool.backends == []
    assert pool.idle_s(26.0) == 10.0 + 10.0


def test_the_least_recently_used_one_leaves_and_one_that_is_wanted_now_does_not():
    pool = WarmPool(2)
    for name, at_s in (("a", 0.0), ("b", 1.0)):
        pool.release(pool.use(name, START_S, at_s), at_s + 5.0)
    pool.warm("c", START_S, 10.0)
    assert [one.name for one in pool.backends] == ["b", "c"]
    pool.warm("d", START_S, 20.0, count=2)
    assert [one.name for one in pool.backends] == ["d", "d"]
    assert pool.warm("e", START_S, 20.0) == []
    pool.use("e", START_S, 20.0)
    assert [one.name for one in pool.backends] == ["d", "e"], "a call has precedence"


def test_a_call_never_waits_for_room_and_what_it_took_beyond_leaves_after_it():
    pool = WarmPool(1)
    first, second = pool.use("a", START_S, 0.0), pool.use("b", START_S, 0.0)
    assert len(pool.backends) == 2
    assert pool.warm("b", START_S, 1.0) == []
    pool.release(second, 3.0)
    assert pool.backends == [first]


def test_a_shared_backend_serves_all_calls():
    pool = WarmPool(4.0, shared=True)
    (model,) = pool.warm("vit", START_S, 0.0, count=3)
    assert pool.use("vit", START_S, 5.0) is pool.use("vit", START_S, 5.0) is model
    assert pool.counts["hit"] == 2
    assert pool.idle_s(6.0) == 3.0
    assert WarmTerms(1.0, {"vit": 5.0}).warm_s("vit") == 5.0
    assert WarmTerms(1.0).warm_s("vit") == 1.0


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "give", "warm"]), st.sampled_from("abc"), st.floats(0.0, 8.0), st.integers(1, 3)
    ),
    max_size=40,
)


@given(
    steps=steps, capacity=st.integers(1, 4), keep_alive_s=st.sampled_from([0.5, 5.0, math.inf]), shared=st.booleans()
)
def test_backends_and_calls_are_all_accounted_for(steps, capacity, keep_alive_s, shared):
    known, taken, now_s, takes = {}, [], 0.0, 0
    pool = WarmPool(capacity, keep_alive_s, shared=shared)
    for what, name, wait_s, count in steps:
        now_s += wait_s
        if what == "take":
            one = pool.use(name, START_S, now_s)
            assert one.name == name
            assert shared or one.users == 1
            taken.append(one)
            takes += 1
        elif what == "give" and taken:
            pool.release(taken.pop(0), now_s)
        elif what == "warm":
            assert all(one.ready_s == now_s + START_S for one in pool.warm(name, START_S, now_s, count))
        in_use, there = {id(one) for one in taken}, {id(one) for one in pool.backends}
        assert len(there) <= max(capacity, len(in_use))
        assert in_use <= there
        known |= {id(one): one for one in (*pool.backends, *taken)}
    counts = pool.counts
    assert counts["hit"] + counts["late"] + counts["miss"] == takes
    assert counts["warmed"] == counts["used"] + counts["wasted"] + sum(one.unused for one in pool.backends)
    assert counts["warmed"] + counts["miss"] == len(known)
