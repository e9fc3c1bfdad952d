"""Lengths by embeddings: what is near enough, what never is, and how little is kept; in a process, with its encoder."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import LengthQuery
from forecasting.lengths.caches import EmbeddingCache, Lesson, Limits
from forecasting.lengths.query import Conversation, Predictions
from forecasting.lengths.subprocess_server import Batch, BatchAnswerer

LIMITS = Limits(entries=3, ttl_s=100.0, similarity=0.95)


def at(degrees, size=1.0):
    angle = np.radians(degrees)
    return (size * np.array([np.cos(angle), np.sin(angle), 0.0])).astype(np.float32)


def query(text="What is a lighthouse?", **more):
    return LengthQuery(text, 5, **{"model": "m", **more})


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def cache(now):
    made = EmbeddingCache(clock=lambda: now[0])
    made.set_limits(LIMITS)
    return made


def put(cache, degrees, tokens, number=1, asked=None):
    cache.look_up(asked or query(), at(degrees), number)
    cache.learn(Lesson(number, tokens, False))


def test_a_near_prompt_has_the_length_of_the_nearest(cache):
    put(cache, 0, 40.0)
    put(cache, 30, 400.0)
    assert cache.look_up(query("Say what lighthouses are"), at(25, size=7.0), 2).mean == 400.0
    assert cache.look_up(query(), at(3), 3).mean == 40.0
    assert cache.look_up(query(), at(60), 4) is None


def test_a_confirmed_length_is_one_entry(cache):
    put(cache, 0, 40.0)
    put(cache, 2, 60.0)
    seen = cache.look_up(query(), at(1), 9)
    assert (len(cache), seen.count, seen.mean) == (1, 2, 50.0)


@pytest.mark.parametrize(
    "other",
    [
        query("Say it in 500 words", model="m"),
        query("Say it in 50 words", model="another"),
        query("Say it in 50 words", conversation=Conversation(5)),
        query(""),
    ],
)
def test_other_numbers_models_and_conversations_are_not_alike(cache, other):
    put(cache, 0, 40.0, asked=query("Say it in 50 words"))
    assert cache.look_up(query("Tell it in 50 words"), at(0), 2) is not None
    assert cache.look_up(other, at(0), 3) is None


@pytest.mark.parametrize("embedding", [np.zeros(3, np.float32), np.full(3, np.nan, np.float32)])
def test_what_has_no_direction_is_like_nothing(cache, embedding):
    put(cache, 0, 40.0)
    assert cache.look_up(query(), embedding, 2) is None
    cache.learn(Lesson(2, 10.0, False))
    assert len(cache) == 1


def test_the_least_lately_used_goes_and_what_is_old_is_forgotten(cache, now):
    for degrees in (0, 40, 80):
        now[0] += 1
        put(cache, degrees, 10.0 + degrees)
    now[0] += 1
    assert cache.look_up(query(), at(0), 5)  # used: 40 is now the oldest
    put(cache, 120, 500.0)
    assert len(cache) == 3
    assert cache.look_up(query(), at(40), 6) is None
    assert cache.look_up(query(), at(0), 7)
    now[0] += 101
    assert cache.look_up(query(), at(0), 8) is None


def test_another_size_begins_empty_and_none_is_off(cache):
    put(cache, 0, 40.0)
    cache.set_limits(LIMITS._replace(similarity=0.5))
    assert cache.look_up(query(), at(50), 2)
    cache.set_limits(LIMITS._replace(entries=0))
    assert len(cache) == 0
    put(cache, 0, 40.0)
    assert cache.look_up(query(), at(0), 3) is None


@given(st.lists(st.tuples(st.integers(0, 359), st.integers(1, 999)), max_size=40))
def test_never_more_entries_than_allowed_and_never_what_is_not_near(asked):
    cache = EmbeddingCache(clock=lambda: 0.0)
    cache.set_limits(LIMITS)
    learned = []
    for number, (degrees, tokens) in enumerate(asked):
        seen = cache.look_up(query(), at(degrees), number)
        if seen is not None:
            near = [length for angle, length in learned if at(angle) @ at(degrees) >= LIMITS.similarity - 0.2]
            assert min(near) <= seen.mean <= max(near)
        cache.learn(Lesson(number, float(tokens), False))
        learned.append((degrees, tokens))
        assert len(cache) <= LIMITS.entries


class Turning:
    """Embeds a prompt by the number in it, in degrees, and takes every answer for 50 tokens."""

    name = "turning"

    def predict_and_embed(self, queries):
        if any("raise" in asked.text for asked in queries):
            raise RuntimeError
        tokens = np.full(len(queries), 50.0)
        embeddings = np.stack([at(len(asked.text)) for asked in queries])
        return Predictions(tokens, np.outer(tokens, (0.4, 0.7, 1.0, 1.5, 2.5))), embeddings


def test_a_process_answers_by_what_it_was_taught():
    answerer = BatchAnswerer(Turning())
    first = answerer.answer(Batch([query("aaaa"), query("b" * 90)], [1, 2], [], LIMITS))
    assert [(each.tokens, each.seen) for each in first] == [(50.0, 0), (50.0, 0)]
    queries = [query("aaab"), query("please raise"), query("c" * 40)]
    again = answerer.answer(Batch(queries, [3, 4, 5], [Lesson(1, 9.0, False)], LIMITS))
    assert [each.seen for each in again] == [1, 0, 0]
    assert again[0].tokens == 9.0
    assert list(again[0].quantiles) == sorted(again[0].quantiles)
    assert np.isnan(again[1].tokens)
    assert again[2][0] == 50.0
