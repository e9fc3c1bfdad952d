"""Whatever a request looks like, its prediction stays within a sane factor."""

import dataclasses

import pytest

from forecasting.lengths import LengthQuery, Trees, bundled
from forecasting.lengths.query import KEPT_HEAD, KEPT_TAIL, read_turns

CAPITAL = "What is the capital of France?"
LANGUAGES = {
    "Arabic": "ما هي عاصمة فرنسا؟",
    "Chinese": "法国的首都是哪里？",  # noqa: RUF001
    "French": "Quelle est la capitale de la France ?",
    "German": "Was ist die Hauptstadt von Frankreich?",
    "Hebrew": "מהי בירת צרפת?",
    "Hindi": "फ्रांस की राजधानी क्या है?",
    "Japanese": "フランスの首都はどこですか？",  # noqa: RUF001
    "Korean": "프랑스의 수도는 어디입니까?",
    "Russian": "Какая столица у Франции?",  # noqa: RUF001
    "Spanish": "¿Cuál es la capital de Francia?",
    "Thai": "เมืองหลวงของฝรั่งเศสคือเมืองอะไร",
    "emoji": "🇫🇷 🏛️ ❓",
}
SANE = 3.0
"""Times, either way, that a question may be longer than the same question alone in English."""


@pytest.fixture(scope="module")
def model() -> Trees:
    return bundled()


@pytest.fixture(scope="module")
def alone(model: Trees) -> float:
    return model.predict_one(LengthQuery(CAPITAL, 8, "m", "t"))[0]


def chat(turns: list[tuple[str, str]], **more: int) -> LengthQuery:
    text, conversation = read_turns(turns, turns[0][1])
    tokens = sum(len(said) for _, said in turns) // 4
    return LengthQuery(text, tokens, "m", "t", turns=len(turns), conversation=conversation, **more)


@pytest.mark.parametrize("messages", range(1, 21))
def test_a_history_does_not_multiply(model: Trees, alone: float, messages: int) -> None:
    said = [("user", CAPITAL) if place % 2 == 0 else ("assistant", "Paris.") for place in range(messages - 1)]
    said.append(("user", CAPITAL))
    marked = chat(said)
    unmarked = dataclasses.replace(marked, conversation=None)
    repeated = LengthQuery("\n".join([CAPITAL] * messages), 8 * messages, "m", "t", turns=messages)
    for query in (marked, unmarked, repeated):
        tokens, quantiles = model.predict_one(query)
        assert alone / SANE < tokens < SANE * alone
        assert quantiles[-1] < 2000


def test_the_context_of_a_question_does_not_multiply(model: Trees, alone: float) -> None:
    asked = ("user", CAPITAL)
    for query in (
        chat([("system", "You are a helpful assistant."), asked]),
        chat([("system", "Answer in one word. " * 400), asked]),
        chat([asked], tools=40),
        chat([asked, ("assistant", ""), ("tool", '{"capital": "Paris"}'), asked]),
        chat([("user", "Write a story."), ("assistant", "Once upon a time. " * 4000), asked]),
        dataclasses.replace(chat([asked]), prompt_tokens=200_000),
    ):
        assert alone / SANE < model.predict_one(query)[0] < 2 * SANE * alone


@pytest.mark.parametrize("tokens", [0, 1, 20, 500, 8000, 128_000, 10**6])
def test_prompts_without_text_are_of_usual_length(model: Trees, tokens: int) -> None:
    assert 5 < model.predict_one(LengthQuery("", tokens, "m", "t"))[0] < 1000


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_is_of_usual_length(model: Trees, alone: float, language: str) -> None:
    question = LANGUAGES[language]
    for text in (question, question * 40):
        assert alone / SANE < model.predict_one(LengthQuery(text, len(text) // 2, "m", "t"))[0] < 2 * SANE * alone


def test_very_long_and_odd_prompts_are_of_usual_length(model: Trees) -> None:
    for text in ("word " * 100_000, "a" * 10**6, "```\n" * 2000, "1234567890 " * 3000, "?" * 5000, "\n" * 9000):
        assert 5 < model.predict_one(LengthQuery(text, len(text) // 4, "m", "t"))[0] < 4000


def test_the_last_message_is_what_is_asked_and_the_others_are_counted() -> None:
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi there."), ("user", CAPITAL)]
    text, known = read_turns(turns)
    assert text == f"Be brief.\nHello\nHi there.\n{CAPITAL}"
    assert known == (len(CAPITAL), 9, 1, 9, 9)
    assert LengthQuery(text, 20, conversation=known).asked == CAPITAL
    assert read_turns([("user", "")]) == ("", (0, 0, 0, 0, 0))
    long, known = read_turns([("user", "first"), ("assistant", "x" * 9000), ("user", "begin" + "y" * 5000)])
    assert long.startswith("beginyyy")
    assert known.asked_characters == len(long) == KEPT_HEAD + 1 + KEPT_TAIL
    assert known.last_answer_characters == 9000
