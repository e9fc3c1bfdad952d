"""The caches of seen lengths: what is a hit, what is forgotten, and limits that no caller can break."""

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import LengthQuery
from forecasting.lengths.caches import MODELS, LengthCache, Limits

STORY = (
    "Please write a friendly letter to my neighbour and thank her for the lemon cake that she baked for the summer "
    "party of our street. Mention the weather, the children and the music, and end with an invitation to dinner."
)


def query(text, model="m", **more):
    return LengthQuery(text, prompt_tokens=max(1, len(text) // 4), model=model, **more)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return LengthCache(Limits(100, 60.0), clock)


def put(cache, text, tokens, *, cut=False, model="m"):
    cache.learn(cache.key(query(text, model)), tokens, cut=cut)


def exact(cache, text, model="m"):
    return cache.seen(cache.key(query(text, model)))


def test_the_same_prompt_is_found_whatever_its_white_space(cache):
    put(cache, "Why is the sky blue?", 80)
    put(cache, "Why  is the\nsky blue? ", 100)
    assert exact(cache, "Why is the sky blue?").estimate(None).tokens == 90
    assert exact(cache, "Why is the sky blue?").count == 2
    assert exact(cache, "why is the sky blue?") is None
    assert exact(cache, "Why is the sky blue?", model="other") is None


def test_prompts_of_which_the_same_part_is_held_differ_by_their_size(cache):
    held = query("a" * 4096)
    cache.learn(cache.key(held, 10_000), 5, cut=False)
    assert cache.seen(cache.key(held, 10_000)).estimate(None).tokens == 5
    assert cache.seen(cache.key(held, 10_001)) is None


def test_token_ids_are_not_looked_up(cache):
    assert cache.key(query("")) is None


def test_a_cut_length_is_only_a_floor(cache):
    put(cache, "long", 16, cut=True)
    seen = exact(cache, "long")
    assert seen.estimate(None) is None  # all that is known is "more than 16"
    assert seen.estimate(8).tokens == 8
    assert seen.estimate(16).tokens == 16
    put(cache, "long", 300)
    put(cache, "long", 16, cut=True)
    assert exact(cache, "long").estimate(None).tokens == 300


def test_the_mean_follows_and_quantiles_widen_with_the_spread(cache):
    for tokens in [100] * 30:
        put(cache, "steady", tokens)
    dice = random.Random(1)
    for _ in range(200):
        put(cache, "wild", 100 * dice.lognormvariate(0, 1))
    steady, wild = (exact(cache, name).estimate(None) for name in ("steady", "wild"))
    assert (steady.seen, wild.seen) == (30, 200)
    assert steady.quantiles[-1] / steady.tokens < 1.1 < 2 < wild.quantiles[-1] / wild.tokens
    assert list(wild.quantiles) == sorted(wild.quantiles)
    for _ in range(200):
        put(cache, "steady", 400)
    assert exact(cache, "steady").estimate(None).tokens == pytest.approx(400, rel=0.02)


def test_entries_are_bounded_and_the_least_lately_used_goes(cache):
    for number in range(100):
        put(cache, f"{STORY} {number}", number + 1)
    exact(cache, f"{STORY} 0")
    put(cache, "one more", 1)
    assert len(cache) == 100
    assert exact(cache, f"{STORY} 0") is not None
    assert exact(cache, f"{STORY} 1") is None


def test_models_are_bounded():
    cache = LengthCache(Limits(3, 60.0))
    for number in range(MODELS + 50):
        put(cache, "a", 1, model=f"m{number}")
    assert len(cache) == MODELS
    assert exact(cache, "a", model="m0") is None


def test_entries_expire(cache, clock):
    put(cache, STORY, 10)
    clock.now_s = 59.0
    assert exact(cache, STORY) is not None
    clock.now_s = 61.0
    assert exact(cache, STORY) is None
    assert len(cache) == 0


@given(st.lists(st.tuples(st.text(max_size=60), st.integers(1, 5000), st.booleans()), max_size=60))
def test_whatever_is_learnt_the_cache_stays_whole(learnt):
    clock = Clock()
    cache = LengthCache(Limits(8, 10.0), clock)
    for text, tokens, cut in learnt:
        clock.now_s += 1
        key = cache.key(query(text * 3))
        if key is None:
            continue
        cache.learn(key, tokens, cut=cut)
        seen = cache.seen(cache.key(query(text * 3)))
        assert seen is not None
        estimate = seen.estimate(None)
        assert estimate is None or 1 <= estimate.tokens <= 5000
        assert len(cache) <= 8


def test_hard_prompts(cache):
    for text in ("a" * 2**20, "\U0001f600" * 5000, "\ud800" * 100, "\0" * 100, " " * 1000 + "x", "1" * 100_000):
        put(cache, text, 7)
        assert exact(cache, text).estimate(None).tokens == 7


def test_no_text_is_kept(cache):
    secret = "My password is hunter2, and it is a secret, not even the cache of lengths."
    key = cache.key(query(secret))
    cache.learn(key, 5, cut=False)
    assert "hunter2" not in repr(cache._shelves)
    assert b"hunter2" not in pickle.dumps(cache._shelves)
    assert "hunter2" not in repr(cache.key(query(secret)))
