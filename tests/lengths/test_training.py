"""Length models of every kind become versions: from texts that tenants keep, from a file, by command and by Celery."""

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Model
from controlplane.lengths import services as versions
from controlplane.lengths import training
from controlplane.lengths.models import BUNDLED, LengthSample, LengthTraining, LengthVersion
from controlplane.lengths.training import read_samples
from forecasting.lengths import Fitting
from forecasting.lengths.datasets import count_tokens
from forecasting.lengths.encoder import TINY
from forecasting.lengths.subprocess_server import load
from tests.examples import at_night_but
from tests.forecasting.lengths import made
from tests.inventory import *  # noqa: F403 (fixtures)
from tests.lengths.test_services import samples, state_folder
from workers.tasks import lengths as tasks
from workers.tasks.planning import LONG_WORK, only_one

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small", "state_folder")]
__all__ = ["state_folder"]

SMALL = Fitting(TINY, tuned=32, read=60, head_epochs=4, most_tokens=24)
COMMAND = ["--tuned=32", "--read=60", "--most-tokens=24"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_ENCODER", TINY)
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)


@pytest.fixture
def keeps(acme):
    acme.keep_prompts = True
    acme.save()
    return acme


def trained(kind):
    return training.train(timezone.now(), kind=kind, fitting=SMALL)


@pytest.mark.parametrize(
    "kind", at_night_but(["ssjf-cls", "trees"], ["preserve", "ssjf-reg-l1", "ssjf-cls", "ssjf-cls-pairwise", "trees"])
)
def test_a_paper_s_model_is_trained_stored_and_served_by_name(kind, keeps, language_model):
    samples(keeps, 80)
    version = trained(kind)
    assert (str(version), version.state, version.file) == (f"{kind} 1", "shadow", f"lengths/{kind}-1.npz")
    assert version.samples + version.measures["held_out"] == 80
    assert version.measures["mae"] > 0
    assert version.measures["active_mae"] > 0
    model = load(kind, version.path)
    assert model.predict([LengthSample.objects.first().query]).tokens[0] >= 1
    assert versions.assigned().of_model == {}
    Model.objects.update(length_model=kind)
    assert versions.assigned() == (BUNDLED, (), {language_model.name: version})
    versions.promote(version, "olga")
    assert str(versions.in_use()) == f"{kind} 1"


def test_shadows_of_several_kinds_coexist(keeps):
    samples(keeps, 60)
    first = trained("class-mean")
    second = trained("prompt-buckets")
    assert versions.assigned().shadows == (second, first)


def test_a_version_that_is_worse_than_its_predecessor_is_rejected(keeps, monkeypatch):
    samples(keeps, 60)
    trained("class-mean")
    monkeypatch.setattr(training, "_mae", lambda version, held_out: 0.5)
    version = trained("class-mean")
    assert version.state == "rejected"
    assert "class-mean 1" in version.note


def test_without_texts_it_says_so(acme, language_model):
    samples(acme, 60)
    with pytest.raises(ActionError, match=r"0 samples with text.*keep prompts.*train_lengths --file"):
        trained("preserve")
    Model.objects.update(length_model="preserve")
    assert training.due(timezone.now()) == ["student"]
    with pytest.raises(ActionError, match="no length model 'oracle'"):
        trained("oracle")


def file_of(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_file_of_the_operator_s(tmp_path, capsys):
    rows = [
        {"text": sample.query.text, "output_tokens": sample.output_tokens, "model": "m"} for sample in made.samples(80)
    ]
    path = file_of(tmp_path / "samples.jsonl", rows)
    call_command("train_lengths", "ssjf-ordinal-l1", f"--file={path}", *COMMAND)
    assert "ssjf-ordinal-l1 1 is shadow" in " ".join(capsys.readouterr().out.split())
    (version,) = LengthVersion.objects.all()
    assert version.samples + version.measures["held_out"] == 80
    cut = file_of(tmp_path / "cut.jsonl", [{**rows[0], "max_tokens": 1}])
    assert read_samples(cut) == []
    (sample,) = read_samples(file_of(tmp_path / "one.jsonl", rows[:1]))
    assert sample.query.prompt_tokens == count_tokens(rows[0]["text"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', "line 1: output_tokens: Field required"),
        ('{"text": "a", "output_tokens": 0}', "line 1: output_tokens"),
        ('{"text": "a", "output_tokens": 3, "prompt": 1}', "line 1: prompt: Extra"),
        ("text", "line 1: no JSON object"),
        ("7", "line 1"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(line, message, tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text(line)
    with pytest.raises(CommandError, match=message):
        call_command("train_lengths", "trees", f"--file={path}")
    with pytest.raises(CommandError, match="cannot be read"):
        call_command("train_lengths", "trees", f"--file={tmp_path / 'none'}")


def test_an_encoder_that_is_not_there_is_said(keeps, monkeypatch, tmp_path):
    samples(keeps, 60)
    monkeypatch.setattr(settings, "LENGTH_ENCODER", str(tmp_path))
    with pytest.raises(CommandError, match="No encoder"):
        call_command("train_lengths", "preserve", *COMMAND)


def test_celery_trains_what_is_asked_for_and_what_models_name(keeps, language_model, monkeypatch):
    monkeypatch.setattr(training, "FITTING", SMALL)
    samples(keeps, 60)
    assert tasks.train_length_model(training.queue("class-mean", "olga", "now").pk) == 1
    assert tasks.train_length_model(training.queue("oracle", "olga", "now").pk) == 0
    event = Event.objects.get(kind="length_version.training_failed")
    assert ("oracle" in event.reason, event.actor) == (True, "olga")
    Model.objects.update(length_model="tenant-histogram")
    now = timezone.now()
    LengthVersion.objects.create(number=2, kind="student", state="rejected", trained_at=now)
    assert training.due(now) == ["tenant-histogram"]
    assert tasks.train_length_model() == 3
    assert LengthVersion.objects.get(number=3).kind == "tenant-histogram"


def test_requested_work_waits_for_other_long_jobs(monkeypatch):
    again = []
    monkeypatch.setattr(
        tasks.train_length_model, "apply_async", lambda *given, **options: again.append((given, options))
    )
    with only_one(LONG_WORK):
        assert tasks.train_length_model() == 0
        assert tasks.train_length_model(7) == 0
    assert again == [(((7,),), {"countdown": tasks.AGAIN_S})]


def test_a_training_reports_its_progress_and_result(keeps, language_model, monkeypatch, settings):
    monkeypatch.setattr(training, "FITTING", SMALL)
    settings.LENGTH_ENCODER_SAMPLES = 32
    monkeypatch.setattr(training, "REPORT_S", 0.0)
    samples(keeps, 80)
    seen, row = [], training.queue("ssjf-cls", "olga", "now")

    def look(*reported):
        now = LengthTraining.objects.get()
        seen.append((now.state, now.step, now.done, now.steps))

    assert (
        training.run(row, fitting=replace(training.usual_fitting(), progress=look)).version
        == LengthVersion.objects.get()
    )
    assert ("running", training.STEPS["tune"], 1, 2) in seen
    assert any(step == training.STEPS["read prompts"] for _, step, _, _ in seen)
    assert (row.state, row.error, row.ended_at > row.started_at) == ("done", "", True)
    assert training.run(row).version.number == 1, "it runs once"
    assert LengthVersion.objects.count() == 1


def test_abandoned_trainings_end_with_a_reason(monkeypatch):
    now = timezone.now()
    lost = training.queue("student", "olga", "now")
    LengthTraining.objects.update(state="running", seen_at=now - timedelta(minutes=16))
    waited = training.queue("student", "olga", "now")
    assert training.end_lost(now) == 1
    LengthTraining.objects.filter(pk=waited.pk).update(asked_at=now - timedelta(hours=2))
    assert training.end_lost(now) == 1
    for row in (lost, waited):
        row.refresh_from_db()
    assert (lost.state, "gone" in lost.error, waited.state, "No worker" in waited.error) == (
        "failed",
        True,
        "failed",
        True,
    )


def test_one_with_a_lost_message_is_requested_again(monkeypatch):
    sent = []
    monkeypatch.setattr(training, "send_task", lambda task, pk, expires_s: sent.append(pk) or True)
    now = timezone.now()
    lost, seen = training.queue("student", "olga", "now"), training.queue("trees", "olga", "now")
    training.queue("class-mean", "", "it is due")
    LengthTraining.objects.update(asked_at=now - timedelta(minutes=5))
    training.note_waiting(seen.pk)  # as a worker does that is busy with something else
    assert training.end_lost(now) == 0
    assert sent == [lost.pk]
