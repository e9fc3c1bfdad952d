"""Versions of the length model: trained, judged, promoted, rejected, rolled back; and what is deleted in time."""

import math
import random
from datetime import timedelta

import pytest
from django.conf import settings
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import notes as notes_module
from controlplane.lengths import services as versions
from controlplane.lengths import training
from controlplane.lengths.models import BUNDLED, LengthMinute, LengthSample, LengthVersion, VersionState
from controlplane.lengths.notes import Notes
from forecasting.files import write_state
from forecasting.lengths import Estimate, Fitting, LengthQuery
from forecasting.lengths.features import MEASURES, unpacked
from forecasting.lengths.query import read_turns
from forecasting.lengths.subprocess_server import load
from tests.inventory import *  # noqa: F403 (fixtures)
from workers.tasks import lengths as tasks

pytestmark = pytest.mark.django_db

STATES = VersionState
TEN = Estimate(10.0, (10.0, 10.0, 10.0, 10.0, 20.0))


@pytest.fixture(autouse=True)
def state_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(settings, "STATE_DIR", tmp_path)
    monkeypatch.setattr(training, "FITTING", Fitting(trees=30))
    return tmp_path


def made(number, state=STATES.SHADOW, file="", **more):
    return LengthVersion.objects.create(number=number, kind="trees", state=state, file=file, **more)


def states():
    return dict(LengthVersion.objects.values_list("number", "state"))


def kinds():
    return list(Event.objects.order_by("pk").values_list("kind", flat=True))


def samples(tenant, count, length=lambda number: 40 if number % 2 else 400, **more):
    """Requests of two sorts, one ten times as long as the other."""
    texts = ("Write a long and detailed essay about {}", "Say yes or no: is {} a fruit?")
    rows = [
        LengthSample.of(
            LengthQuery(texts[number % 2].format(f"thing {number}"), 12, "m", tenant.name, "interactive", **more),
            timezone.now().timestamp(),
            tenant.pk,
            100,
            "trees 0",
            length(number),
        )
        for number in range(count)
    ]
    notes_module.write(Notes(samples=rows))


def measured(predictor, error, requests, minutes=3):
    now = timezone.now().replace(second=0, microsecond=0)
    for back in range(minutes):
        LengthMinute.objects.create(
            minute=now - timedelta(minutes=back),
            model="m",
            tenant="acme",
            predictor=predictor,
            requests=requests // minutes,
            output_tokens=100 * requests // minutes,
            absolute_error_tokens=error * requests // minutes,
        )


# Training


def test_training_learns_from_features_alone_and_stays_in_the_shadow(acme, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 100)
    samples(acme, 400)
    assert not LengthSample.objects.exclude(text="").exists()
    version = training.train(timezone.now(), reason="a test")
    assert (version.number, version.state, version.file) == (1, "shadow", "lengths/trees-1.npz")
    assert version.samples + version.measures["held_out"] == 400
    assert version.measures["mae"] < version.measures["active_mae"]
    trained = load(version.kind, version.path)
    long, short = (
        trained.predict_one(LengthQuery(text, 12, "m", "acme"))[0]
        for text in ("Write a long and detailed essay about thing 9", "Say yes or no: is thing 8 a fruit?")
    )
    assert long > 2 * short
    assert versions.assigned() == (BUNDLED, version)
    assert kinds() == ["length_version.trained"]
    assert training.train(timezone.now()).number == 2
    assert states() in ({1: "rejected", 2: "shadow"}, {1: "shadow", 2: "rejected"})


def test_held_out_errors_are_of_both_versions(acme, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)
    samples(acme, 100)
    versions.promote(training.train(timezone.now(), kind="class-mean"), "olga")
    version = training.train(timezone.now())
    held_out = [sample for sample in training.stored("trees") if training._held_out(sample)]
    active = load("class-mean", versions.in_use().path).predict([sample.query for sample in held_out]).tokens
    errors = [abs(tokens - sample.output_tokens) for tokens, sample in zip(active, held_out, strict=True)]
    assert version.measures["active"] == "class-mean 1"
    assert version.measures["active_mae"] == pytest.approx(sum(errors) / len(errors), abs=0.001)


def test_a_text_that_its_tenant_keeps_no_more_is_not_read_though_it_is_not_deleted_yet(acme, monkeypatch):
    Tenant.objects.filter(pk=acme.pk).update(keep_prompts=True)
    samples(acme, 1)
    (kept,) = training.stored("trees")
    Tenant.objects.filter(pk=acme.pk).update(keep_prompts=False)
    (blank,) = training.stored("trees")
    assert (bool(kept.query.text), blank.query.text) == (True, "")
    assert blank.query.features == kept.query.features


def test_too_few_samples_are_refused_and_cut_ones_do_not_count(acme, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)
    samples(acme, 60, max_tokens=40)
    with pytest.raises(ActionError, match="0 samples"):
        training.train(timezone.now())


def test_features_of_another_version_are_left_out(acme, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)
    samples(acme, 60)
    LengthSample.objects.update(features=b"of an older release")
    with pytest.raises(ActionError, match="0 samples"):
        training.train(timezone.now())


def test_the_task_trains_when_it_is_due_and_on_demand(acme, monkeypatch, settings):
    asked = []

    def train(now, actor=versions.ACTOR, reason="", kind="trees"):
        asked.append((actor, reason, kind))
        return LengthVersion.objects.filter(number=7).first() or made(7, STATES.REJECTED)

    monkeypatch.setattr(training, "train", train)
    settings.LENGTH_TRAIN_SAMPLES = 50
    assert tasks.train_length_model() == 0  # nothing to learn from
    samples(acme, 60)
    assert tasks.train_length_model() == 7
    assert tasks.train_length_model() == 0
    assert tasks.train_length_model("trees", "olga", "now please") == 7
    assert asked == [(versions.ACTOR, "it is due", "trees"), ("olga", "now please", "trees")]
    LengthVersion.objects.update(trained_at=timezone.now() - timedelta(days=2))
    assert tasks.train_length_model() == 7
    settings.LENGTH_TRAIN_EVERY_S = 0.0
    assert tasks.train_length_model() == 0


# Moves


@pytest.mark.sql
def test_promotion_retires_what_was_active_and_a_rollback_brings_it_back(operator):
    one, two = made(1, STATES.ACTIVE), made(2)
    assert versions.promote(two, operator, "better").state == STATES.ACTIVE
    assert states() == {1: "retired", 2: "active"}
    assert str(versions.in_use()) == "trees 2"
    assert versions.rollback(None, operator, "worse").number == 1
    assert states() == {1: "active", 2: "rejected"}
    assert versions.rollback(None, operator) is None
    assert versions.assigned() == (BUNDLED, None)
    with pytest.raises(ActionError):
        versions.rollback(None, operator)
    one.refresh_from_db()
    assert one.state == STATES.REJECTED
    assert kinds() == [
        "length_version.retired",
        "length_version.promoted",
        "length_version.rolled_back",
        "length_version.restored",
        "length_version.rolled_back",
    ]
    assert Event.objects.filter(actor=operator.username).count() == 5


def test_only_a_shadow_is_promoted_or_rejected(operator):
    for number, state in enumerate((STATES.RETIRED, STATES.REJECTED, STATES.ACTIVE), 1):
        version = made(number, state)
        for verb in (versions.promote, versions.reject):
            with pytest.raises(ActionError, match=state):
                verb(version, operator)
    shadow = made(9)
    assert versions.reject(shadow, operator).state == STATES.REJECTED


def test_one_goes_back_only_to_a_retired_version(operator):
    made(1, STATES.ACTIVE)
    with pytest.raises(ActionError, match="shadow"):
        versions.rollback(made(2), operator)
    old = made(3, STATES.RETIRED)
    made(4, STATES.RETIRED)
    assert versions.rollback(old, operator).number == 3
    assert old.state == STATES.ACTIVE


@pytest.mark.parametrize("file", ["lengths/gone.npz", "lengths/../../etc/passwd", "/etc/passwd", "secret_key"])
def test_a_version_whose_file_cannot_be_used_is_not_promoted(operator, file, state_folder):
    (state_folder / "secret_key").write_text("key")
    with pytest.raises((ActionError, ValueError)):
        versions.promote(made(1, file=file), operator)
    assert states() == {1: "shadow"}


def test_a_file_of_an_older_format_is_refused_in_words(operator, acme, monkeypatch, state_folder):
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)
    (state_folder / "lengths").mkdir()
    write_state(state_folder / "lengths" / "trees-1.npz", {"model": "trees", "version": 1})
    old = made(1, file="lengths/trees-1.npz")
    with pytest.raises(ActionError, match=r"cannot be used.*trees of version 1, this version reads 2"):
        versions.promote(old, operator)
    LengthVersion.objects.update(state=STATES.ACTIVE)
    with pytest.raises(ActionError, match="cannot be used"):
        versions.promote(made(2, file="lengths/trees-1.npz"), operator)


def test_samples_carry_the_conversation_to_the_next_training(acme):
    said = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi there."), ("user", "And now?")]
    text, conversation = read_turns(said)
    queries = [
        LengthQuery(text, 12, "m", "acme", "interactive", None, 4, conversation, 3),
        LengthQuery("", 900, "m", "acme", "interactive"),
    ]
    now = timezone.now().timestamp()
    notes_module.write(Notes(samples=[LengthSample.of(query, now, acme.pk, 100, "trees 0", 40) for query in queries]))
    read = [
        dict(zip(MEASURES, unpacked(bytes(row.features), notes_module.reader().text)[:-1].tolist(), strict=True))
        for row in LengthSample.objects.order_by("pk")
    ]
    assert [row["has_text"] for row in read] == [1.0, 0.0]
    chat = read[0]
    assert chat["log_turns"] == pytest.approx(math.log1p(4), abs=0.01)
    assert chat["log_tools"] == pytest.approx(math.log1p(3), abs=0.01)
    assert chat["log_system"] == chat["log_last_answer"] == pytest.approx(math.log1p(9), abs=0.01)
    assert chat["log_characters"] == pytest.approx(math.log1p(len("And now?")), abs=0.01)
    assert read[1]["log_prompt_tokens"] == pytest.approx(math.log1p(900), abs=0.01)


# Judging


@pytest.mark.parametrize(
    ("shadow_error", "requests", "state"),
    [(80, 3000, "active"), (99, 3000, "rejected"), (120, 3000, "rejected"), (80, 300, "shadow")],
)
def test_a_shadow_is_judged_by_a_margin_over_enough_requests(shadow_error, requests, state):
    version = made(1, trained_at=timezone.now() - timedelta(hours=1))
    measured("trees 0", 100, 6000)
    measured("shadow trees 1", shadow_error, requests)
    tasks.judge_length_versions()
    assert states() == {1: state}
    if state != "shadow":
        event = Event.objects.get(kind__in=["length_version.promoted", "length_version.rejected"])
        assert f"{shadow_error}.0 tokens over {requests:,} requests, trees 0 100.0 over 6,000" in event.reason
        why = {80: "20.0% better, at least 2%", 99: "1.0% better, less than the 2% wanted", 120: "20.0% worse"}
        assert why[shadow_error] in event.reason
        assert LengthVersion.objects.get(number=1).note == event.reason
        assert event.actor == versions.ACTOR
    version.refresh_from_db()


@pytest.mark.parametrize(("late", "state"), [(60, "active"), (600, "rejected")])
def test_a_shadow_that_is_late_is_rejected_however_exact(late, state):
    made(1, trained_at=timezone.now() - timedelta(hours=1))
    measured("trees 0", 100, 6000)
    measured("shadow trees 1", 50, 3000)
    LengthMinute.objects.filter(predictor="shadow trees 1").update(late=late // 3)
    tasks.judge_length_versions()
    assert states() == {1: state}
    note = LengthVersion.objects.get(number=1).note
    assert ("20.0% of 3,000 answers came later than requests wait" in note) == (state == "rejected")


def test_nothing_is_judged_unless_requested(monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_PROMOTE", False)
    made(1, trained_at=timezone.now() - timedelta(hours=1))
    measured("trees 0", 100, 6000)
    measured("shadow trees 1", 10, 6000)
    assert tasks.judge_length_versions() == 0
    assert states() == {1: "shadow"}


def test_without_a_shadow_there_is_nothing_to_judge():
    assert versions.judge(timezone.now()) is None


# What is written, and deleted


@pytest.mark.sql
def test_measures_of_several_batches_add_up(acme):
    dice, now = random.Random(1), timezone.now().timestamp()
    for _ in range(3):
        notes = Notes()
        for _ in range(50):
            notes.measure(
                now,
                "m",
                "acme",
                "trees 0",
                Estimate(100.0, (90.0, 90.0, 90.0, 90.0, 200.0)),
                dice.choice([60, 100, 126, 300]),
            )
        notes_module.write(notes)
    rows = LengthMinute.objects.all()
    assert sum(row.requests for row in rows) == 150
    (row,) = rows
    assert 0 < row.within_25 <= row.within_50 <= row.within_100 < 150
    assert (row.predicted_tokens, row.late) == (150 * 100, 0)


def test_what_could_not_be_written_adds_up_too():
    first, second = Notes(), Notes()
    for notes in (first, second):
        notes.measure(0.0, "m", "t", "prior", TEN, 12)
    first.samples.append("a sample")
    second.add(first)
    assert [sums.requests for sums in second.minutes.values()] == [2]
    assert second.samples == []


def test_held_measures_are_bounded(monkeypatch):
    monkeypatch.setattr(notes_module, "HELD_SERIES", 5)
    notes = Notes()
    for number in range(9):
        notes.measure(60.0 * number, "m", "t", "prior", TEN, 12)
    assert (len(notes.minutes), notes.given_up) == (5, 4)


def test_trees_that_are_gone_cost_samples_but_no_measures(acme, monkeypatch):
    def gone():
        raise OSError

    monkeypatch.setattr(notes_module, "reader", gone)
    notes = Notes(samples=[LengthSample.of(LengthQuery("x", 1, "m"), 0.0, acme.pk, 1, "prior", 1)])
    notes.measure(0.0, "m", "t", "prior", TEN, 12)
    notes_module.write(notes)
    assert (LengthMinute.objects.count(), LengthSample.objects.count()) == (1, 0)


@pytest.mark.sql
def test_text_is_stored_as_a_database_takes_it(acme):
    Tenant.objects.filter(pk=acme.pk).update(keep_prompts=True)
    query = LengthQuery("a\0b \ud800 c", 3, "m", "acme", "interactive")
    notes_module.write(Notes(samples=[LengthSample.of(query, 0.0, acme.pk, 1, "prior", 1)]))
    assert LengthSample.objects.get().text == "a b ? c"


@pytest.mark.sql
def test_old_rows_go_and_texts_with_the_wish_to_keep_them(acme, monkeypatch):
    Tenant.objects.filter(pk=acme.pk).update(keep_prompts=True)
    monkeypatch.setattr(settings, "LENGTH_SAMPLES", 4)
    samples(acme, 8)
    newest = list(LengthSample.objects.order_by("-pk").values_list("pk", flat=True)[:4])
    LengthSample.objects.filter(pk=newest[-1]).update(at=timezone.now() - timedelta(days=15))
    measured("prior", 1, 9)
    LengthMinute.objects.filter(pk=LengthMinute.objects.first().pk).update(minute=timezone.now() - timedelta(days=31))
    versions.prune(timezone.now())
    assert LengthSample.objects.exclude(text="").count() == 4
    assert set(newest[:3]) < set(LengthSample.objects.values_list("pk", flat=True))
    assert LengthMinute.objects.count() == 2
    Tenant.objects.filter(pk=acme.pk).update(keep_prompts=False)
    versions.prune(timezone.now())
    assert LengthSample.objects.count() == 4
    assert not LengthSample.objects.exclude(text="").exists()
