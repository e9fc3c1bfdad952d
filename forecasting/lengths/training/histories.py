"""Conversations, system prompts and prompts without text, made from answers to single prompts.

No set whose licence lets a fitted model be shipped has conversations. So those that a student learns from are put together:
earlier prompts of the same source with the same model's answers stand before a prompt. The last prompt alone decides how
long the answer is, and how long the answers before were says which source and which model this is: what a student is to take
from a history. Some histories come without a word on which message is which, as from a client that sends one text.
"""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from forecasting.lengths.query import LengthQuery, Sample
from forecasting.lengths.text.conversation import joined, read_turns
from forecasting.lengths.training.datasets import AnsweredPrompt, count_tokens

SHARE: Final = 0.7
"""Made samples for each real one."""
KINDS: Final = (("history", 0.65), ("system", 0.2), ("no text", 0.15))
MOST_PAIRS: Final = 12
ANOTHER_PAIR: Final = 0.7
WITH_SYSTEM: Final = 0.4
"""Of histories."""
UNMARKED: Final = 0.35
"""Of histories, those of which it is not known which message is the last."""
COUNTED_WRONG: Final = 0.15
"""Standard deviation of the logarithm of the prompt's tokens, which a gateway only estimates."""
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a helpful, respectful and honest assistant.",
    "You are a careful expert. Think before you answer, and say so when you do not know.",
    "You are a support agent of an online shop. Be polite, ask for the order number, and never promise a refund.",
    "You are a senior software engineer. Answer with working code and explain what is not obvious.",
    "You help students with their homework. Do not give the solution at once; lead them to it by questions.",
    "Answer in the language of the user. Today is Monday. The user is signed in and has a paid plan.",
)


def with_histories(pairs: Sequence[AnsweredPrompt], seed: int = 1) -> list[Sample]:
    """A sample of each of *pairs* alone, and `SHARE` as many made ones; names of tenants are hidden."""
    dice = random.Random(seed)
    sources: dict[tuple[str, str], list[AnsweredPrompt]] = defaultdict(list)
    for pair in pairs:
        sources[pair.source, pair.model].append(pair)
    names, shares = [name for name, _ in KINDS], [share for _, share in KINDS]
    samples = []
    for pair in pairs:
        alone = LengthQuery(pair.prompt, count_tokens(pair.prompt), model=pair.model)
        if dice.random() < 0.5:  # as the gateway asks, which knows that this is one message of a chat
            alone = dataclasses.replace(alone, conversation=read_turns([("user", pair.prompt)])[1])
        samples.append(Sample(alone, pair.tokens))
        if dice.random() >= SHARE:
            continue
        kind = dice.choices(names, shares)[0]
        if kind == "no text":
            made = dataclasses.replace(alone, text="", conversation=None)
        else:
            made = _conversation(pair, sources[pair.source, pair.model], kind == "system", dice)
        counted = max(1, round(made.prompt_tokens * dice.lognormvariate(0.0, COUNTED_WRONG)))
        samples.append(Sample(dataclasses.replace(made, prompt_tokens=counted), pair.tokens))
    return samples


def _conversation(
    pair: AnsweredPrompt, others: Sequence[AnsweredPrompt], system: bool, dice: random.Random
) -> LengthQuery:
    turns: list[tuple[str, str]] = []
    if system or dice.random() < WITH_SYSTEM:
        turns.append(("system", dice.choice(SYSTEM_PROMPTS)))
        if dice.random() < 0.3:  # a long one
            turns[0] = ("system", turns[0][1] + "\n" + dice.choice(others).prompt)
    if not system:
        count = 1
        while count < MOST_PAIRS and dice.random() < ANOTHER_PAIR:
            count += 1
        for other in dice.choices(others, k=count):
            turns += [("user", other.prompt), ("assistant", other.answer)]
    turns.append(("user", pair.prompt))
    texts = [text for _, text in turns]
    tokens = sum(map(count_tokens, texts))
    if dice.random() < UNMARKED:
        return LengthQuery(joined(texts, texts[0]), tokens, model=pair.model, turns=len(turns))
    text, conversation = read_turns(turns, texts[0])
    return LengthQuery(text, tokens, model=pair.model, turns=len(turns), conversation=conversation)
