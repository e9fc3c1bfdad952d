import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import LengthPrior, LengthQuery
from forecasting.lengths.online import CHARACTERS_PER_TOKEN, OUTPUT_TOKENS


def query(**changes) -> LengthQuery:
    return LengthQuery(
        **({"text": "", "prompt_tokens": 0, "model": "m", "tenant": "acme", "slo_class": "interactive"} | changes)
    )


def test_knows_nothing_at_first():
    prior = LengthPrior()
    assert prior.output_tokens(query()) == OUTPUT_TOKENS
    assert prior.prompt_tokens("m", 400) == 400 / CHARACTERS_PER_TOKEN


def test_forced_length_is_exact_and_teaches_nothing():
    prior = LengthPrior()
    assert prior.output_tokens(query(ignore_eos=True, max_tokens=77, sequences=2)) == 154
    prior.learn(query(ignore_eos=True), 9999, 0, 0)
    assert prior.output_tokens(query()) == OUTPUT_TOKENS


def test_learns_the_tenant_before_the_class_before_the_model():
    prior = LengthPrior()
    for _ in range(200):
        prior.learn(query(tenant="acme"), 40, 0, 0)
        prior.learn(query(tenant="other"), 600, 0, 0)
    assert prior.output_tokens(query(tenant="acme")) == pytest.approx(40, abs=1)
    assert prior.output_tokens(query(tenant="other")) == pytest.approx(600, abs=1)
    assert 200 < prior.output_tokens(query(tenant="new")) < 450  # the class's mean over both tenants


def test_follows_a_change_of_characters_per_token():
    prior = LengthPrior()
    for _ in range(1000):
        prior.learn(query(), 10, characters=200, prompt_tokens=100)
    assert prior.prompt_tokens("m", 1000) == 500
    assert prior.prompt_tokens("unseen", 1000) == 250


@given(
    st.lists(st.integers(1, 10_000), max_size=30),
    st.integers(1, 5_000),
    st.integers(1, 8),
    st.data(),
)
def test_stays_within_what_the_request_allows(seen, max_tokens, sequences, data):
    min_tokens = data.draw(st.integers(0, max_tokens))
    prior = LengthPrior()
    for tokens in seen:
        prior.learn(query(), tokens, 0, 0)
    predicted = prior.output_tokens(query(max_tokens=max_tokens, min_tokens=min_tokens, sequences=sequences))
    assert max(1, min_tokens) * sequences <= predicted <= max_tokens * sequences
