"""The caches of seen lengths: what is a hit, what is forgotten, and limits that no caller can break."""

import math
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import LengthQuery
from forecasting.lengths.caches import BINS, MODELS, LengthCache, Limits, signature
from tests.oracles.signature import signature_plain

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
    return LengthCache(Limits(100, 60.0, 0.85), clock)


def put(cache, text, tokens, *, cut=False, model="m"):
    cache.learn(cache.key(query(text, model)), tokens, cut=cut)


def exact(cache, text, model="m"):
    return cache.exact(cache.key(query(text, model)))


def nearest(cache, text, model="m"):
    return cache.nearest(cache.key(query(text, model)))


@given(st.text(max_size=400))
def test_the_compiled_signature_is_the_plain_one(text):
    one, other = signature(text), signature_plain(text)
    assert (one[0] is None) == (other[0] is None)
    if one[0] is not None:
        assert np.array_equal(one[0], other[0])
    assert one[1] == other[1]


def test_equal_bins_estimate_the_similarity_of_shingles():
    dice = random.Random(4)
    words = [f"{dice.getrandbits(30):x}" for _ in range(400)]
    errors = []
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        for _ in range(10):
            one = dice.sample(words, 120)
            other = [dice.choice(words) if dice.random() > share else word for word in one]
            texts = [" ".join(one), " ".join(other)]
            sets = [{text[at : at + 5] for at in range(len(text) - 4)} for text in texts]
            jaccard = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
            bins = [signature(text)[0] for text in texts]
            errors.append(np.mean(bins[0] == bins[1]) - jaccard)
    assert abs(np.mean(errors)) < 0.03
    assert np.std(errors) < 2 / math.sqrt(BINS)


def test_the_same_prompt_is_found_whatever_its_white_space(cache):
    put(cache, "Why is the sky blue?", 80)
    put(cache, "Why  is the\nsky blue? ", 100)
    assert exact(cache, "Why is the sky blue?").estimate(None).tokens == 90
    assert exact(cache, "Why is the sky blue?").count == 2
    assert exact(cache, "why is the sky blue?") is None
    assert exact(cache, "Why is the sky blue?", model="other") is None


def test_a_prompt_almost_the_same_is_found_and_one_of_another_number_is_not(cache):
    put(cache, STORY + " Use 50 words.", 70)
    assert nearest(cache, STORY.replace("lemon", "melon") + " Use 50 words.").estimate(None).tokens == 70
    assert nearest(cache, STORY + " Use 500 words.") is None
    assert nearest(cache, "Tell me how a lighthouse works, and who looks after it at night. Use 50 words.") is None


def test_the_nearest_of_several_is_taken(cache):
    put(cache, STORY, 10)
    put(cache, STORY.replace("children", "parents"), 20)
    wanted = STORY.replace("children", "parents").replace("dinner.", "dinner")
    assert nearest(cache, wanted).estimate(None).tokens == 20


def test_prompts_of_which_the_same_part_is_held_differ_by_their_size(cache):
    held = query("a" * 4096)
    cache.learn(cache.key(held, 10_000), 5, cut=False)
    assert cache.exact(cache.key(held, 10_000)).estimate(None).tokens == 5
    assert cache.exact(cache.key(held, 10_001)) is None


def test_a_short_prompt_is_never_like_another(cache):
    put(cache, "Say yes.", 1)
    assert nearest(cache, "Say yes!") is None
    assert exact(cache, "Say yes.").estimate(None).tokens == 1


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
    assert nearest(cache, f"{STORY} 1") is None


def test_models_are_bounded():
    cache = LengthCache(Limits(3, 60.0, 0.85))
    for number in range(MODELS + 50):
        put(cache, "a", 1, model=f"m{number}")
    assert len(cache) == MODELS
    assert exact(cache, "a", model="m0") is None


def test_entries_expire(cache, clock):
    put(cache, STORY, 10)
    clock.now_s = 59.0
    assert nearest(cache, STORY) is not None
    clock.now_s = 61.0
    assert nearest(cache, STORY) is None
    assert exact(cache, STORY) is None
    assert len(cache) == 0


@given(st.lists(st.tuples(st.text(max_size=60), st.integers(1, 5000), st.booleans()), max_size=60))
def test_whatever_is_learnt_the_cache_stays_whole(learnt):
    clock = Clock()
    cache = LengthCache(Limits(8, 10.0, 0.85), clock)
    for text, tokens, cut in learnt:
        clock.now_s += 1
        key = cache.key(query(text * 3))
        if key is None:
            continue
        cache.learn(key, tokens, cut=cut)
        seen = cache.exact(cache.key(query(text * 3)))
        assert seen is not None
        estimate = seen.estimate(None)
        assert estimate is None or 1 <= estimate.tokens <= 5000
        assert len(cache) <= 8
        for shelf in cache._shelves.values():
            assert all(len(band) <= len(shelf.entries) for band in shelf.bands)
            assert all(digest in shelf.entries for band in shelf.bands for digest in band.values())


def test_an_attack_on_the_bands_costs_no_more_than_a_look_up(cache, monkeypatch):
    """Prompts that share every band are compared with eight entries at most, however many were sent."""
    for number in range(100):
        put(cache, STORY + " x" * number, 5)
    compared = []
    count = np.count_nonzero
    monkeypatch.setattr(np, "count_nonzero", lambda equal: compared.append(1) or count(equal))
    nearest(cache, STORY + " y")
    assert 1 <= len(compared) <= 8


def test_hard_prompts(cache):
    for text in ("a" * 2**20, "\U0001f600" * 5000, "\ud800" * 100, "\0" * 100, " " * 1000 + "x", "1" * 100_000):
        put(cache, text, 7)
        assert exact(cache, text).estimate(None).tokens == 7
        nearest(cache, text + "b")


def test_no_text_is_kept(cache):
    secret = "My password is hunter2, and it is a secret, not even the cache of lengths."
    key = cache.key(query(secret))
    cache.learn(key, 5, cut=False)
    assert "hunter2" not in repr(cache._shelves)
    assert b"hunter2" not in pickle.dumps(cache._shelves)
    assert "hunter2" not in repr(cache.key(query(secret)))
    assert key.text == ""
