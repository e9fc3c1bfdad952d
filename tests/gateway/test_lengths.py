"""The length service in a whole gateway: who answers, what is learnt and kept, and that nothing of it breaks serving."""

import asyncio
import logging
import math
import random
import time

import orjson
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import connection

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.gateway.admission.validation import parse
from controlplane.gateway.lengths import service as module
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion
from controlplane.lengths.services import InUse
from forecasting.lengths import OutputQuery
from forecasting.lengths.models.state import save_model
from forecasting.lengths.service import predictor
from forecasting.lengths.service.predictor import InLine, SubprocessPredictor
from tests.gateway.conftest import until
from tests.lengths.bad_models import Scripted, constant, slow

BAD = "tests.lengths.bad_models"
LONG = "Write a long and friendly letter to the neighbours about the summer party in our street, with the lemon cake."


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.1)
    monkeypatch.setattr(predictor, "LEAST_REST_S", 0.05)
    monkeypatch.setattr(predictor, "HANGS_S", 0.3)


@pytest.fixture
async def service(house):
    """The house's length service, with a model that takes every answer for 50 tokens."""
    lengths = house.gateway.lengths
    await use(lengths, InLine(constant("50"), 5.0))
    return lengths


async def use(lengths, predictor):
    """Let *predictor* answer from now on; what asks for versions leaves it alone."""
    for task in lengths._tasks:
        task.cancel()
    before, lengths.predictor = lengths.predictor, predictor
    if before is not None:
        await before.stop()


def in_database(read):
    return database_sync_to_async(read)()


async def say(house, text, tokens=None, **body):
    """One request, served; *tokens*: how long its answer comes to be."""
    if tokens is not None:
        house.backends[0].script.tokens = tokens
    async with asyncio.timeout(30):
        response = await house.chat(messages=[{"role": "user", "content": text}], **body)
        assert response.status == 200, await response.text()
        await response.read()


async def told(house):
    """The last request's prediction, as its ledger row has it."""
    return (await house.rows())[-1].trace[0]["length"]


async def test_model_then_exact_cache_then_semantic_cache(house, service):
    await say(house, LONG, 40)
    assert await told(house) == {"tokens": 50, "upper_tokens": 125, "source": "student 0"}
    await say(house, LONG, 40)
    exact = await told(house)
    assert (exact["tokens"], exact["source"], exact["seen"]) == (40, "cache", 1)
    assert 40 < exact["upper_tokens"] < 100
    await say(house, LONG.replace("lemon", "melon"), 40)
    assert (await told(house))["source"] == "semantic cache"
    row = (await house.rows())[-1]
    assert row.predicted_output_tokens == 40
    assert service.answered == {"student": 1, "cache": 1, "semantic": 1}


async def test_rules_of_the_request_bound_every_source(house, service):
    await say(house, LONG, 20, max_tokens=30)
    assert (await told(house))["tokens"] == 30
    await say(house, LONG, 20, min_tokens=35)
    assert (await told(house))["tokens"] == 35  # the cache says 20
    await say(house, "Another question, quite unlike the first one, about ships.", 20, n=3)
    found = await told(house)
    assert found["tokens"] % 3 == 0
    assert found["tokens"] > 100  # of three sequences


async def test_forced_lengths_teach_nothing(house, service):
    for _ in range(3):
        await say(house, LONG, 64, max_tokens=64, ignore_eos=True)
        assert await told(house) == {"tokens": 64, "upper_tokens": 64, "source": "forced"}
    assert len(service.cache) == 0
    await service.flush()
    assert await in_database(LengthMinute.objects.count) == 0
    await say(house, LONG, 40)
    assert (await told(house))["source"] == "student 0"


async def test_what_max_tokens_cut_is_not_taken_for_a_length(house, service):
    await say(house, LONG, 500, max_tokens=16)
    await say(house, LONG, 500)
    assert (await told(house))["source"] == "student 0"
    await say(house, LONG, 500)
    assert (await told(house))["tokens"] == 500


async def test_streams_learn_as_well(house, service):
    async with await house.chat(messages=[{"role": "user", "content": LONG}], stream=True) as response:
        await response.read()
    await until(lambda: len(service.cache) == 1)


@pytest.mark.parametrize("factor", [0.1, 10])
async def test_a_model_that_is_ten_times_off_is_put_right(house, service, factor):
    for number in range(40):
        await say(house, f"Question {number * 1337} about something else, {number}", round(50 * factor))
    assert (await told(house))["tokens"] == pytest.approx(50 * factor, rel=0.5)
    assert service.failed == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0, 0.0, 1e12])
async def test_a_model_that_makes_no_sense_is_not_heard(house, service, value):
    await use(service, InLine(Scripted(lambda query: value), 5.0))
    for number in range(8):
        await say(house, f"question {number}")
    found = await told(house)
    assert (found["source"], found["tokens"]) == ("prior", (await house.rows())[-1].predicted_output_tokens)
    assert found["why"] in {"senseless", "resting"}
    assert service.failed["senseless"] >= 5
    assert service.answered["prior"] == 8


async def test_a_model_that_raises_is_not_heard_and_says_nothing_of_the_prompt(house, service, caplog):
    def say_nothing(query):
        raise RuntimeError(query.text)

    caplog.set_level(logging.DEBUG)
    await use(service, InLine(Scripted(say_nothing), 5.0))
    await say(house, "the secret word is abracadabra")
    assert (await told(house))["why"] == "failed"
    assert "abracadabra" not in caplog.text


async def test_a_service_that_fails_altogether_breaks_nothing(house, service, monkeypatch):
    def broken(*arguments, **named):
        raise MemoryError

    monkeypatch.setattr(service.cache, "key", broken)
    monkeypatch.setattr(module.notes.Notes, "measure", broken)
    await say(house, LONG)
    assert (await told(house))["why"] == "failed"


async def test_a_killed_process_is_survived_and_replaced(house, service):
    predictor = SubprocessPredictor(5.0, f"{BAD}:constant", ("50",))
    predictor.start()
    await use(service, predictor)
    await until(predictor.up.is_set, 120)
    await say(house, "one question")
    assert (await told(house))["source"] == "student 0"
    predictor.process.kill()
    await until(lambda: not predictor.up.is_set())
    await say(house, "another question")
    assert (await told(house))["why"] == "down"
    await until(predictor.up.is_set, 120)
    await say(house, "a third question")
    assert (await told(house))["source"] == "student 0"
    assert service.snapshot()["restarts"] == 1


async def test_a_hanging_process_costs_each_request_the_budget_at_most(house, service):
    predictor = SubprocessPredictor(0.02, f"{BAD}:at_word", ())
    predictor.start()
    await use(service, predictor)
    service.budget_s = 0.02
    await until(predictor.up.is_set, 120)
    waits = []

    async def timed(number):
        began = time.monotonic()
        found = await service.predict(*asked(f"please hang {number}"))
        waits.append(time.monotonic() - began)
        return found.why

    assert set(await asyncio.gather(*map(timed, range(30)))) <= {"late", "down"}
    assert sorted(waits)[15] < 1.0  # the budget is 20 ms; a busy machine may add to it, a hang would be for ever
    assert service.late >= 1
    await say(house, "well")
    await until(lambda: predictor.restarts >= 1, 120)


def asked(text):
    """Arguments of `predict` for one question."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    return parse(orjson.dumps(body), chat=True, max_depth=32), "acme", OutputQuery("m", "acme", "interactive"), 5


async def test_a_model_that_is_too_slow_in_line_is_moved_apart_and_comes_back(house, monkeypatch):
    lengths = house.gateway.lengths
    monkeypatch.setattr("controlplane.gateway.lengths.service.fast_enough", lambda model, limit_s: fast)
    fast = False
    lengths.budget_s = 0.001
    before, lengths.predictor = lengths.predictor, InLine(slow("0.002"), 0.001)
    for number in range(10):
        await lengths.predict(*asked(f"question {number}"))
    await until(lambda: isinstance(lengths.predictor, SubprocessPredictor), 60)
    await say(house, "served meanwhile")
    lengths._in_line_again_s = 0.0
    await until(lambda: time.monotonic() < lengths._in_line_again_s < math.inf, 60)  # measured again, as slow as before
    assert isinstance(lengths.predictor, SubprocessPredictor)
    fast = True
    lengths._in_line_again_s = 0.0
    await until(lambda: isinstance(lengths.predictor, InLine), 60)
    assert lengths._in_line_again_s == math.inf
    await say(house, "served in line again")
    if before is not None:
        await before.stop()


ADVERSARIAL = [
    "a" * 1_000_000,
    "\U0001f600" * 50_000,
    "\u202e\u0000\ufffe" * 1000,
    "7" * 200_000,
    " " * 500_000 + "x",
    "\n" * 10_000,
    "",
]


@pytest.mark.parametrize(
    "text", ADVERSARIAL, ids=["letters", "emoji", "controls", "digits", "blanks", "lines", "nothing"]
)
async def test_adversarial_prompts_are_served(house, text):
    for _ in range(3):
        await say(house, text, 20)
    lengths = house.gateway.lengths
    await lengths.flush()
    assert len(lengths.cache) == (1 if text.strip() else 0)
    assert (await told(house))["source"] == ("cache" if text.strip() else "student 0")
    assert lengths.failed["failed"] == 0


async def test_deep_conversations_and_odd_bodies_are_served(house):
    turns = [{"role": "user", "content": "and then?"}, {"role": "assistant", "content": None}] * 5000
    parts = [{"type": "text", "text": "look"}] * 2000 + [{"type": "image_url", "image_url": {"url": "data:"}}]
    for messages in (turns, [{"role": "user", "content": parts}], [{"role": "user", "content": []}]):
        response = await house.chat(messages=messages)
        assert response.status == 200, await response.text()
    for prompt in ([1, 2, 3], [[1, 2], [3]], ["a", "b"], "x"):
        response = await house.http.post(
            f"{house.url}/v1/completions", json={"model": "m", "prompt": prompt}, headers=house.headers
        )
        assert response.status == 200, await response.text()
    assert house.gateway.lengths.failed["failed"] == 0


async def test_a_lone_surrogate_gets_an_answer(house):
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800 and \\udfff"}]}'
    headers = house.headers | {"Content-Type": "application/json"}
    response = await house.http.post(f"{house.url}/v1/chat/completions", data=raw, headers=headers)
    assert response.status in {200, 400}


def whole_database():
    """Every value of every table, as text."""
    found = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')
            for row in cursor.fetchall():
                found += [bytes(each).decode("latin-1") if isinstance(each, bytes) else str(each) for each in row]
    return "\n".join(found)


@pytest.mark.parametrize("keeps", [False, True])
async def test_text_is_kept_only_of_tenants_that_want_it(house, service, keeps, caplog):
    caplog.set_level(logging.DEBUG)
    await in_database(lambda: Tenant.objects.update(keep_prompts=keeps))
    secret = "My password is hunter2, please tell nobody about it, least of all the database of this house."
    await say(house, secret, 40)
    await house.rows()
    assert await service.flush()
    sample = await in_database(LengthSample.objects.get)
    assert (sample.text == secret) is keeps
    assert (sample.output_tokens, sample.predicted_tokens, sample.predicted_by) == (40, 50, "student 0")
    assert bytes(sample.features)
    assert ("hunter2" in await in_database(whole_database)) is keeps
    assert "hunter2" not in caplog.text
    assert "hunter2" not in repr(service.snapshot())


async def test_measures_are_written_by_the_minute_and_bucket(house, service):
    for number, tokens in enumerate((40, 45, 300)):
        await say(house, f"quite another question, number {number * 77}, about {number}", tokens)
    await service.flush()
    rows = await in_database(lambda: list(LengthMinute.objects.order_by("bucket_tokens")))
    assert [(row.bucket_tokens, row.requests, row.output_tokens) for row in rows if row.bucket_tokens == 256] == [
        (256, 1, 300)
    ]
    assert sum(row.requests for row in rows) == 3
    assert {(row.model, row.tenant, row.predictor) for row in rows} == {("m", "acme", "student 0")}


async def test_a_database_that_is_away_costs_samples_but_no_measures(house, service, monkeypatch):
    def down(notes):
        raise ConnectionError

    write = module.notes.write
    monkeypatch.setattr(module.notes, "write", down)
    await say(house, "one question", 40)
    assert not await service.flush()
    monkeypatch.setattr(module.notes, "write", write)
    await say(house, "another question that is not the same", 40)
    assert await service.flush()
    rows = await in_database(lambda: list(LengthMinute.objects.all()))
    assert sum(row.requests for row in rows) == 2


async def test_samples_are_an_even_share(house, service, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_SAMPLES_PER_MIN", 36)  # three between two flushes
    for number in range(40):
        await say(house, f"question {number}")
    assert len(service.notes.samples) == 3
    monkeypatch.setattr(settings, "LENGTH_SAMPLES_PER_MIN", 0)
    await service.flush()
    await say(house, "one more")
    assert service.notes.samples == []


async def test_a_shift_raises_the_alarm_where_operators_see_it(house, service):
    dice = random.Random(3)
    for number in range(130):
        found = await service.predict(*asked(f"{number} first"))
        service.learn(found, asked("")[2], 1, round(50 * dice.lognormvariate(0, 0.3)))
    assert service.snapshot()["drift"] == []
    for number in range(60):
        found = await service.predict(*asked(f"{number} later"))
        service.learn(found, asked("")[2], 1, round(400 * dice.lognormvariate(0, 0.3)))
    (alarm,) = service.snapshot()["drift"]
    assert (alarm["model"], alarm["tenant"], alarm["longer"]) == ("m", "acme", True)
    service.notes.samples.clear()
    assert await service.flush()
    event = await in_database(lambda: Event.objects.get(kind="length.drift"))
    assert event.inputs["what"] == "longer"
    assert b"pilothouse_length_drifts 1.0" in await metrics(house)


async def metrics(house):
    async with house.http.get(f"{house.url}/metrics") as response:
        return await response.read()


async def test_metrics_and_summary_tell_of_it(house, service):
    await say(house, LONG)
    page = await metrics(house)
    assert b'pilothouse_length_answers_total{source="student"} 1.0' in page
    assert b'pilothouse_length_seconds{quantile="0.99"}' in page
    summary = house.gateway.publisher.summary.snapshot()["lengths"]
    assert summary["answered"] == {"cache": 0, "semantic": 0, "student": 1, "prior": 0, "forced": 0}
    assert summary["p99_ms"] >= summary["p50_ms"] > 0
    assert summary["version"] == "student 0"


class TestOff:
    @pytest.fixture(autouse=True)
    def off(self, monkeypatch):
        monkeypatch.setattr(settings, "LENGTHS", False)

    async def test_the_prior_answers_alone(self, house):
        await say(house, LONG, 40)
        assert (await told(house))["why"] == "off"
        assert (await told(house))["tokens"] == 256
        await house.gateway.lengths.flush()
        assert await in_database(LengthMinute.objects.count) == 0


class TestNoStudent:
    @pytest.fixture(autouse=True)
    def gone(self, monkeypatch):
        def lost(kind, file):
            raise OSError("no such file")

        monkeypatch.setattr(module, "load", lost)

    async def test_without_any_model_the_prior_and_the_caches_answer(self, house):
        await say(house, LONG, 40)
        assert (await told(house))["why"] == "down"
        await say(house, LONG, 40)
        assert (await told(house))["source"] == "cache"


async def test_versions_are_taken_up_and_given_back_while_serving(house, tmp_path, monkeypatch):
    """A promoted version answers within a refresh, its shadow predicts beside it, and a rollback undoes it."""
    made = {"": constant("50"), "one.npz": constant("70"), "two.npz": constant("90")}
    monkeypatch.setattr(module, "load", lambda kind, file: made[file.rpartition("/")[2]])
    lengths = house.gateway.lengths

    def version(number, state, file):
        return LengthVersion.objects.create(number=number, kind="student", state=state, file=f"lengths/{file}")

    one = await in_database(lambda: version(1, "active", "one.npz"))
    await until(lambda: lengths.active.number == 1)
    await say(house, "a first question", 40)
    assert await told(house) == {"tokens": 70, "upper_tokens": 175, "source": "student 1"}

    await in_database(lambda: version(2, "shadow", "two.npz"))
    await until(lambda: lengths.shadow is not None)
    await say(house, "quite another question", 40)
    await lengths.flush()
    rows = await in_database(lambda: {row.predictor: row for row in LengthMinute.objects.all()})
    assert rows["shadow student 2"].predicted_tokens == 90
    assert rows["shadow student 2"].output_tokens == 40
    assert lengths.snapshot()["shadow"] == "student 2"

    one.state = "retired"
    await in_database(one.save)
    await until(lambda: lengths.active.number == 0)
    await in_database(lambda: LengthVersion.objects.create(number=3, kind="student", state="active", file="lengths/no"))
    await asyncio.sleep(0.5)
    await say(house, "a third question, of a broken version", 40)
    assert (await told(house))["source"] == "student 0"


async def test_an_active_version_of_an_older_format_leaves_the_bundled_one(house, caplog, tmp_path):
    lengths = house.gateway.lengths
    for task in lengths._tasks:
        task.cancel()
    save_model(tmp_path / "student-1.npz", "student", 1, {"weights": {}})
    before = lengths.predictor
    await lengths._take_up(InUse(1, "student", str(tmp_path / "student-1.npz")))
    assert "student of version 1, this version reads 2" in caplog.text
    assert (lengths.active, lengths.predictor) == (module.BUNDLED, before)
    await say(house, LONG, 40)
    assert (await told(house))["source"] == "student 0"


async def test_a_message_of_history_does_not_multiply(house):
    turns = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
    found = []
    for count in (0, 1, 2, 10):
        response = await house.chat(messages=[*turns * count, turns[0]])
        assert response.status == 200
        await response.read()
        said = await told(house)
        assert said["source"] in {"student 0", "semantic cache", "cache"}
        if said["source"] == "student 0":
            found.append(said["tokens"])
    assert len(found) >= 2
    assert max(found) < 3 * min(found)
