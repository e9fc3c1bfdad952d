"""Faults of the length service never break serving: bad models, killed and hanging processes, adversarial prompts."""

import asyncio
import logging
import time

import pytest

from controlplane.lengths import length_service as module
from controlplane.tuning.selectors import Values
from forecasting.lengths.predictor import InLine, SubprocessPredictor
from tests.examples import at_night_but
from tests.gateway.conftest import until
from tests.gateway.lengths.calls import LONG, asked, prediction_of, say, use
from tests.lengths.bad_models import Scripted

BAD = "tests.lengths.bad_models"


@pytest.mark.parametrize("value", at_night_but([-3.0, 1e12], [float("nan"), float("inf"), -3.0, 0.0, 1e12]))
async def test_senseless_predictions_are_not_used(served, service, value):
    await use(service, InLine(Scripted(lambda query: value)))
    for number in range(8):
        await say(served, f"question {number}")
    prediction = await prediction_of(served)
    assert (prediction["source"], prediction["tokens"]) == ("prior", (await served.rows())[-1].predicted_output_tokens)
    assert prediction["why"] in {"senseless", "resting"}
    assert service.failed["senseless"] >= 5
    assert service.answered["prior"] == 8


async def test_a_model_that_raises_is_not_heard_and_says_nothing_of_the_prompt(served, service, caplog):
    def say_nothing(query):
        raise RuntimeError(query.text)

    caplog.set_level(logging.DEBUG)
    await use(service, InLine(Scripted(say_nothing)))
    await say(served, "the secret word is abracadabra")
    assert (await prediction_of(served))["why"] == "failed"
    assert "abracadabra" not in caplog.text


async def test_a_service_that_fails_altogether_breaks_nothing(served, service, monkeypatch):
    def broken(*arguments, **named):
        raise MemoryError

    monkeypatch.setattr(service.cache, "key", broken)
    monkeypatch.setattr(module.notes.Notes, "measure", broken)
    await say(served, LONG)
    assert (await prediction_of(served))["why"] == "failed"


async def test_a_hanging_process_costs_each_request_the_budget_at_most(served, service):
    predictor = SubprocessPredictor(f"{BAD}:at_word", ())
    predictor.start()
    await use(service, predictor)
    service.tune(Values({"": {"LENGTH_BUDGET_MS": 20.0}}))
    await until(predictor.up.is_set, 120)
    waits = []

    async def timed(number):
        began = time.monotonic()
        prediction = await service.predict(*asked(f"please hang {number}"))
        waits.append(time.monotonic() - began)
        return prediction.why

    assert set(await asyncio.gather(*map(timed, range(30)))) <= {"late", "down"}
    assert sorted(waits)[15] < 1.0  # the budget is 20 ms; a busy machine may add to it, a hang would be endless
    assert service.late >= 1
    assert predictor.timing.in_time < predictor.timing.asked
    await say(served, "well")
    await until(lambda: service.snapshot()["restarts"] >= 1, 120)


ADVERSARIAL = [
    "a" * 1_000_000,
    "\U0001f600" * 50_000,
    "\u202e\u0000\ufffe" * 1000,
    "7" * 200_000,
    " " * 500_000 + "x",
    "\n" * 10_000,
    "",
]


async def test_adversarial_prompts_are_served(served):
    lengths, kept = served.gateway.lengths, 0
    for text in ADVERSARIAL:
        for _ in range(3):
            await say(served, text, 20)
        await lengths.flush()
        kept += bool(text.strip())
        assert len(lengths.cache) == kept, text[:9]
        assert (await prediction_of(served))["source"] == ("cache" if text.strip() else "trees 0"), text[:9]
    assert lengths.failed["failed"] == 0


async def test_deep_conversations_and_odd_bodies_are_served(served):
    conversation = [{"role": "user", "content": "and then?"}, {"role": "assistant", "content": None}] * 5000
    parts = [{"type": "text", "text": "look"}] * 2000 + [{"type": "image_url", "image_url": {"url": "data:"}}]
    for messages in (conversation, [{"role": "user", "content": parts}], [{"role": "user", "content": []}]):
        response = await served.chat(messages=messages)
        assert response.status == 200, await response.text()
    for prompt in ([1, 2, 3], [[1, 2], [3]], ["a", "b"], "x"):
        response = await served.post("/v1/completions", {"model": "m", "prompt": prompt})
        assert response.status == 200, await response.text()
    assert served.gateway.lengths.failed["failed"] == 0
