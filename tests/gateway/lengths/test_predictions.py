"""The length service in a whole gateway: its answers, learning, bounds, and versions."""

import asyncio

import pytest
from django.conf import settings

from controlplane.accounts.models import Tenant
from controlplane.lengths import answering
from controlplane.lengths.answering import RunningVersion
from controlplane.lengths.length_service import LengthService
from controlplane.lengths.models import BUNDLED, LengthMinute, LengthVersion
from controlplane.lengths.selectors import newest_samples
from controlplane.lengths.services import Assigned
from controlplane.tuning.selectors import Values
from forecasting.files import write_state
from forecasting.lengths import LengthPrior, LengthQuery
from forecasting.lengths.online import START_WEIGHT
from forecasting.lengths.predictor import InLine
from tests.examples import at_night_but
from tests.gateway.conftest import until
from tests.gateway.lengths.calls import LONG, in_database, prediction_of, say
from tests.lengths.bad_models import constant
from tests.lengths.test_services import samples


async def test_the_model_then_the_cache(served, service):
    await say(served, LONG, 40)
    assert await prediction_of(served) == {"tokens": 50, "upper_tokens": 125, "source": "trees 0"}
    await say(served, LONG, 40)
    exact = await prediction_of(served)
    assert (exact["tokens"], exact["source"], exact["seen"]) == (40, "cache", 1)
    assert 40 < exact["upper_tokens"] < 100
    row = (await served.rows())[-1]
    assert row.predicted_output_tokens == 40
    assert service.answered == {"model": 1, "cache": 1}


async def test_what_tenants_taught_survives_a_restart(served):
    tenant = await in_database(lambda: Tenant.objects.get(name="acme"))
    await in_database(lambda: samples(tenant, 60, lambda number: 30 + number % 7))
    again = answering.Answering()
    await again.run(Assigned(BUNDLED, None))
    query = LengthQuery("Write a long and detailed essay about ships", 9, "m", "acme", "interactive")
    assert again.active.online.correct(query, 400.0, [400.0] * 5).usual == pytest.approx(33, abs=1)
    assert again.active.online.weights["acme"].value != START_WEIGHT
    encoder = RunningVersion(LengthVersion(pk=1, number=1, kind="preserve"), InLine(constant("50")))
    encoder.recall(None, await in_database(lambda: newest_samples(50)))
    corrected = encoder.online.correct(query, 400.0, [400.0] * 5)
    assert (corrected.usual, corrected.calibrated) == (pytest.approx(33, abs=1), 400.0)


def test_each_model_has_its_budget():
    service = LengthService(LengthPrior())
    service.tune(Values({"": {"LENGTH_BUDGET_MS": 20.0}, "m": {"LENGTH_BUDGET_MS": 70.0}}))
    assert (service.budget_s("m"), service.budget_s("other")) == (0.07, 0.02)


async def test_a_late_shadow_is_measured_as_late(service):
    shadow = RunningVersion(LengthVersion(pk=2, number=2, kind="trees"), InLine(constant("50")))
    service.answering.shadow, active = shadow, service.answering.active
    query = LengthQuery("a question", 5, "m", "acme")
    for budget_s in (0.0, 10.0):
        service.answering.finished(active, query, 40.0, budget_s, cut=False)
    service.answering.finished(shadow, query, 40.0, 10.0, cut=False)  # not by the active version
    await service._measure_shadow()
    measured = list(service.notes.minutes.values())
    assert (sum(one.requests for one in measured), sum(one.late for one in measured)) == (2, 1)
    (_, report) = service.snapshot()["models"]
    assert (report["version"], report["shadow"], report["asked"]) == ("trees 2", True, 2)


async def test_rules_of_the_request_bound_every_source(served, service):
    await say(served, LONG, 20, max_tokens=30)
    assert (await prediction_of(served))["tokens"] == 30
    await say(served, LONG, 20, min_tokens=35)
    assert (await prediction_of(served))["tokens"] == 35  # the cache says 20
    await say(served, "Another question, quite unlike the first one, about ships.", 20, n=3)
    prediction = await prediction_of(served)
    assert prediction["tokens"] % 3 == 0
    assert prediction["tokens"] >= 3 * 20  # of three sequences, near the usual length of this tenant


async def test_forced_lengths_teach_nothing(served, service):
    for _ in range(3):
        await say(served, LONG, 64, max_tokens=64, ignore_eos=True)
        assert await prediction_of(served) == {"tokens": 64, "upper_tokens": 64, "source": "forced"}
    assert len(service.cache) == 0
    await service.flush()
    assert await in_database(LengthMinute.objects.count) == 0
    await say(served, LONG, 40)
    assert (await prediction_of(served))["source"] == "trees 0"


async def test_what_max_tokens_cut_is_not_taken_for_a_length(served, service):
    await say(served, LONG, 500, max_tokens=16)
    await say(served, LONG, 500)
    assert (await prediction_of(served))["source"] == "trees 0"
    await say(served, LONG, 500)
    assert (await prediction_of(served))["tokens"] == 500


async def test_streams_learn_as_well(served, service):
    async with await served.chat(messages=[{"role": "user", "content": LONG}], stream=True) as response:
        await response.read()
    await until(lambda: len(service.cache) == 1)


@pytest.mark.parametrize("factor", at_night_but([10], [0.1, 10]))
async def test_a_model_that_is_ten_times_off_is_put_right(served, service, factor):
    for number in range(40):
        await say(served, f"Question {number * 1337} about something else, {number}", round(50 * factor))
    assert (await prediction_of(served))["tokens"] == pytest.approx(50 * factor, rel=0.5)
    assert service.failed == {}


class TestOff:
    @pytest.fixture(autouse=True)
    def off(self, monkeypatch):
        monkeypatch.setattr(settings, "LENGTHS", False)

    async def test_the_prior_answers_alone(self, served):
        await say(served, LONG, 40)
        assert (await prediction_of(served))["why"] == "off"
        assert (await prediction_of(served))["tokens"] == 256
        await served.gateway.lengths.flush()
        assert await in_database(LengthMinute.objects.count) == 0


class TestNoModel:
    @pytest.fixture(autouse=True)
    def gone(self, monkeypatch):
        def lost(kind, file):
            raise OSError("no such file")

        monkeypatch.setattr(answering, "load", lost)

    async def test_without_any_model_the_prior_and_the_cache_answer(self, served):
        await say(served, LONG, 40)
        assert (await prediction_of(served))["why"] == "down"
        await say(served, LONG, 40)
        assert (await prediction_of(served))["source"] == "cache"


def in_this_process(models):
    """Make predictors of shadows here, from *models* by the names of their files."""

    def make(arguments):
        predictor = InLine(models[arguments[1].rpartition("/")[2]])
        predictor.start = lambda: None
        return predictor

    return make


async def test_versions_are_taken_up_and_given_back_while_serving(served, tmp_path, monkeypatch):
    """A promoted version answers within a refresh, its shadow predicts alongside, and a rollback undoes it."""
    made = {"": constant("50"), "one.npz": constant("70"), "two.npz": constant("90")}
    monkeypatch.setattr(answering, "load", lambda kind, file: made[file.rpartition("/")[2]])
    monkeypatch.setattr(answering, "SubprocessPredictor", in_this_process(made))
    lengths = served.gateway.lengths

    def version(number, state, file):
        return LengthVersion.objects.create(number=number, kind="trees", state=state, file=f"lengths/{file}")

    one = await in_database(lambda: version(1, "active", "one.npz"))
    await until(lambda: lengths.answering.active.version.number == 1)
    await say(served, "a first question", 40)
    assert await prediction_of(served) == {"tokens": 70, "upper_tokens": 175, "source": "trees 1"}

    await in_database(lambda: version(2, "shadow", "two.npz"))
    await until(lambda: str(lengths.answering.shadow and lengths.answering.shadow.version) == "trees 2")
    await say(served, "quite another question", 40)
    await lengths.flush()
    rows = await in_database(lambda: {row.predictor: row for row in LengthMinute.objects.all()})
    assert 40 < rows["shadow trees 2"].predicted_tokens <= 90  # what the tenant was answered before counts
    assert rows["shadow trees 2"].output_tokens == 40
    assert lengths.snapshot()["shadow"] == "trees 2"

    one.state = "retired"
    await in_database(one.save)
    await until(lambda: lengths.answering.active.version.number == 0)
    await in_database(lambda: LengthVersion.objects.create(number=3, kind="trees", state="active", file="lengths/no"))
    await asyncio.sleep(0.5)
    await say(served, "a third question, of a broken version", 40)
    assert (await prediction_of(served))["source"] == "trees 0"


async def test_the_bundled_version_answers_where_the_active_one_does_not(served, service):
    active = RunningVersion(LengthVersion(pk=1, number=1, kind="ssjf-cls"), InLine(constant("nan")))
    service.answering.active = active
    await say(served, "a question that the active one has no answer to", 40)
    prediction = await prediction_of(served)
    assert (prediction["source"], prediction["why"]) == ("trees 0", "senseless")
    active.predictor.model.say = lambda query: 90.0
    await say(served, "another, that it has one to", 40)
    assert await prediction_of(served) == {"tokens": 90, "upper_tokens": 225, "source": "ssjf-cls 1"}


async def test_an_active_version_of_an_older_format_leaves_the_bundled_one(served, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "STATE_DIR", tmp_path)
    (tmp_path / "lengths").mkdir()
    lengths = served.gateway.lengths
    for task in lengths._tasks:
        task.cancel()
    write_state(tmp_path / "lengths" / "trees-1.npz", {"model": "trees", "version": 1})
    before = lengths.answering.active
    await lengths.answering.run(Assigned(LengthVersion(pk=1, number=1, kind="trees", file="lengths/trees-1.npz"), None))
    assert "trees of version 1, this version reads 2" in caplog.text
    assert (lengths.answering.active, before.version) == (before, BUNDLED)
    await say(served, LONG, 40)
    assert (await prediction_of(served))["source"] == "trees 0"


async def test_a_message_of_history_does_not_multiply(served):
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = {"role": "assistant", "content": "Paris."}
    predicted = []
    for count in (0, 1, 2, 10):
        response = await served.chat(messages=[*[question, answer] * count, question])
        assert response.status == 200
        await response.read()
        said = await prediction_of(served)
        assert said["source"] in {"trees 0", "cache"}
        if said["source"] == "trees 0":
            predicted.append(said["tokens"])
    assert len(predicted) >= 2
    assert max(predicted[1:]) < 3 * predicted[0]  # they fall as the tenant's answers are seen
