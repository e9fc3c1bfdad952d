"""Prompts in words for demo traffic: they fit, name the lengths that are wanted, and come again now and then."""

import statistics

from workers.emulator import requested_length
from workers.emulator.text import count_tokens
from workers.traffic.prompts import CHARACTERS_PER_TOKEN, Instructions


def test_the_same_seed_asks_the_same() -> None:
    one, same, other = (Instructions(seed) for seed in (1, 1, 2))
    said = [[made.prompt(300, 120, True) for _ in range(20)] for made in (one, same, other)]
    assert said[0] == said[1] != said[2]


def test_prompts_fit_and_are_not_empty() -> None:
    made = Instructions(3)
    for tokens in (1, 8, 40, 900, 30_000):
        for waited_for in (True, False):
            prompts = [made.prompt(tokens, 120, waited_for) for _ in range(50)]
            assert all(prompt and len(prompt) <= tokens * CHARACTERS_PER_TOKEN for prompt in prompts)


def test_answers_are_about_as_long_as_wanted_and_of_many_lengths() -> None:
    made = Instructions(4)
    requested = [
        requested_length.read(prompt, count_tokens(prompt))
        for prompt in (made.prompt(900, 700, False) for _ in range(400))
    ]
    lengths = [length.tokens for length in requested if length]
    assert len(lengths) == 400  # every prompt says what it wants
    assert statistics.median(lengths) == 700.0
    assert len(set(lengths)) > 3


def test_some_come_again_word_for_word_and_some_nearly_so() -> None:
    made = Instructions(5)
    prompts = [made.prompt(400, 120, True) for _ in range(600)]
    again = sum(prompt in prompts[:at] for at, prompt in enumerate(prompts))
    nearly = sum(prompt.startswith("Please help me.") for prompt in prompts)
    assert 20 < nearly < 120
    assert 30 < again < 350
