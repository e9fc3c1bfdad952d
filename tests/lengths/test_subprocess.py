"""A length model asked from an event loop: in line and in a subprocess, well and badly behaved."""

import asyncio
import os
import signal
import time

import pytest

from forecasting.lengths import LengthQuery, bundled
from forecasting.lengths import predictor as module
from forecasting.lengths.predictor import (
    MOST_TOKENS,
    Estimate,
    InLine,
    SubprocessPredictor,
    Unanswered,
    checked,
)
from tests.gateway.conftest import until
from tests.lengths.bad_models import Scripted

BAD = "tests.lengths.bad_models"
BUDGET_S = 5.0


def query(text="hello"):
    return LengthQuery(text, 5, "m", "t")


@pytest.fixture(autouse=True)
def short_rests(monkeypatch):
    monkeypatch.setattr(module, "LEAST_REST_S", 0.05)
    monkeypatch.setattr(module, "HANGS_S", 0.3)


@pytest.fixture
async def subprocess():
    """`await subprocess("name", "argument")`: a process that is up."""
    started = []

    async def make(name, *arguments):
        predictor = SubprocessPredictor(f"{BAD}:{name}", arguments)
        predictor.start()
        started.append(predictor)
        await asyncio.wait_for(predictor.up.wait(), 120)
        return predictor

    yield make
    for predictor in started:
        await predictor.stop()


async def answers(predictor, text="hello", timeout_s=120.0):
    """What it answers once it is up."""
    async with asyncio.timeout(timeout_s):
        while True:
            await predictor.up.wait()
            answer = await predictor.ask(query(text), BUDGET_S)
            if answer is not Unanswered.DOWN:
                return answer


@pytest.mark.parametrize(
    ("tokens", "quantiles"),
    [
        (float("nan"), (1, 2, 3, 4, 5)),
        (float("inf"), (1, 2, 3, 4, 5)),
        (-5.0, (1, 2, 3, 4, 5)),
        (0.2, (1, 2, 3, 4, 5)),
        (2 * MOST_TOKENS, (1, 2, 3, 4, 5)),
        (5.0, (1, 2, float("nan"), 4, 5)),
        (5.0, (5, 4, 3, 2, 1)),
        (5.0, (1, 2, 3)),
        (5.0, (1, 2, 3, 4, 1e12)),
        (None, (1, 2, 3, 4, 5)),
        (5.0, None),
        ("many", (1, 2, 3, 4, 5)),
    ],
)
def test_what_cannot_be_a_length_is_no_answer(tokens, quantiles):
    assert checked(tokens, quantiles) is Unanswered.SENSELESS


def test_what_can_be_is():
    assert checked(5, [1, 2, 3, 4, 5]) == Estimate(5.0, (1.0, 2.0, 3.0, 4.0, 5.0))


HARD = [
    "Why is the sky blue?",
    "Write a story of 500 words about a lighthouse keeper. " * 12,
    "def f(x):\n    return x\n" * 170,
    "a" * 4096,
    "1 2 3 " * 680,
    "\U0001f600" * 4096,
    "\u0416\u0438\u0437\u043d\u044c " * 680,
    "\ud800" * 512,
]


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_the_bundled_trees_bear_hard_prompts(text):
    assert isinstance(checked(*bundled().predict_one(LengthQuery(text, max(1, len(text) // 4), "m", "t"))), Estimate)


async def test_in_line_rests_after_failures_and_comes_back():
    now = [0.0]
    model = Scripted(lambda asked: float("nan"))
    predictor = InLine(model, clock=lambda: now[0])
    assert [await predictor.ask(query(), 1.0) for _ in range(5)] == [Unanswered.SENSELESS] * 5
    assert await predictor.ask(query(), 1.0) is Unanswered.RESTING
    assert model.asked == 5
    now[0] = 0.2
    assert await predictor.ask(query(), 1.0) is Unanswered.SENSELESS  # one try, and it rests for longer
    now[0] = 0.27
    assert await predictor.ask(query(), 1.0) is Unanswered.RESTING
    now[0] = 1.0
    model.say = lambda asked: 7.0
    assert (await predictor.ask(query(), 1.0)).tokens == 7.0
    assert (await predictor.ask(query(), 1.0)).tokens == 7.0


async def test_in_line_an_exception_is_no_answer_and_its_text_is_not_logged(caplog):
    def say(asked):
        raise RuntimeError(asked.text)

    caplog.set_level("DEBUG")
    assert await InLine(Scripted(say)).ask(query("secret"), 1.0) is Unanswered.FAILED
    assert "secret" not in caplog.text


async def test_subprocess_many_at_once_go_in_few_batches(subprocess):
    predictor = await subprocess("slow", "0.001")
    replies = await asyncio.gather(*(predictor.ask(query(), BUDGET_S) for _ in range(100)))
    assert {reply.tokens for reply in replies} == {50.0}
    assert predictor.batches < 20


async def test_subprocess_a_late_answer_is_given_up_at_the_budget(subprocess):
    predictor = await subprocess("slow", "0.2")
    began = time.monotonic()
    replies = await asyncio.gather(*(predictor.ask(query(), 0.02) for _ in range(50)))
    assert set(replies) == {Unanswered.LATE}
    assert (predictor.timing.asked, predictor.timing.in_time) == (50, 0)
    assert time.monotonic() - began < 5


async def test_subprocess_a_killed_process_is_down_and_comes_back(subprocess):
    predictor = await subprocess("constant", "50")
    assert (await predictor.ask(query(), BUDGET_S)).tokens == 50.0
    first = predictor.process.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: not predictor.up.is_set())  # noticed without a query
    assert await predictor.ask(query(), BUDGET_S) is Unanswered.DOWN
    assert (await answers(predictor)).tokens == 50.0
    assert predictor.process.pid != first
    assert predictor.restarts == 1


@pytest.mark.parametrize("word", ["die", "hang"])
async def test_subprocess_that_dies_or_hangs_fails_no_request(subprocess, word):
    predictor = await subprocess("at_word")
    replies = await asyncio.gather(*(predictor.ask(query(text), BUDGET_S) for text in ("well", word, "well")))
    assert replies[1] is Unanswered.DOWN
    assert (await answers(predictor)).tokens == 50.0


async def test_subprocess_a_query_that_raises_costs_its_own_answer_alone(subprocess):
    predictor = await subprocess("at_word")
    replies = await asyncio.gather(*(predictor.ask(query(text), BUDGET_S) for text in ("well", "raise", "nan", "well")))
    assert replies[1:3] == [Unanswered.SENSELESS, Unanswered.SENSELESS]
    assert replies[0].tokens == replies[3].tokens == 50.0
    assert predictor.restarts == 0


async def test_subprocess_what_cannot_be_made_is_down_and_tried_again():
    predictor = SubprocessPredictor(f"{BAD}:no_such_model")
    predictor.start()
    while predictor.restarts < 2:
        assert await predictor.ask(query(), BUDGET_S) is Unanswered.DOWN
        await asyncio.sleep(0.02)
    await predictor.stop()


async def test_subprocess_has_the_bundled_trees_and_leaves_no_process():
    predictor = SubprocessPredictor()
    predictor.start()
    answer = await answers(predictor, "Why is the sky blue?")
    expected = bundled().predict_one(query("Why is the sky blue?"))
    assert answer.tokens == pytest.approx(expected[0])
    lone = await predictor.ask(query("\ud800"), BUDGET_S)
    assert isinstance(lone, Estimate)
    process = predictor.process
    await predictor.stop()
    assert process.returncode is not None


async def test_subprocess_no_more_than_so_many_wait(subprocess, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 10)
    predictor = await subprocess("slow", "0.01")
    replies = await asyncio.gather(*(predictor.ask(query(), BUDGET_S) for _ in range(40)))
    assert Unanswered.DOWN in replies
    assert any(isinstance(reply, Estimate) for reply in replies)
