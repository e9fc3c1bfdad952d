"""Length models of every kind become versions, from texts that tenants keep, by Celery."""

import asyncio
from dataclasses import replace

import pytest
from django.conf import settings
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import services as versions
from controlplane.lengths import training
from controlplane.lengths.models import BUNDLED, LengthSample, LengthVersion
from forecasting.lengths import ON_ENCODER, Fitting
from forecasting.lengths.encoder import TINY, stack
from forecasting.lengths.predictor import SubprocessPredictor
from forecasting.lengths.subprocess_server import load
from tests.examples import at_night_but
from tests.inventory import *  # noqa: F403 (fixtures)
from tests.lengths.test_services import samples, state_folder
from workers.tasks import lengths as tasks
from workers.tasks.planning import LONG_WORK, only_one

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("small", "state_folder")]
__all__ = ["state_folder"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_ENCODER", TINY)
    monkeypatch.setattr(settings, "LENGTH_TRAIN_SAMPLES", 50)
    monkeypatch.setattr(training, "FITTING", Fitting(tuned=32, read=50, head_epochs=1, most_tokens=24, trees=10))


@pytest.fixture
def keeps(acme):
    acme.keep_prompts = True
    acme.save()
    return acme


def trained(kind):
    return training.train(timezone.now(), kind=kind)


@pytest.mark.parametrize("kind", at_night_but(["ssjf-cls", "trees"], ["preserve", "ssjf-reg-l1", "ssjf-cls", "trees"]))
def test_a_kind_is_trained_stored_shadows_and_is_promoted(kind, keeps):
    samples(keeps, 80)
    version = trained(kind)
    assert (str(version), version.file) == (f"{kind} 1", f"lengths/{kind}-1.npz")
    assert version.samples + version.measures["held_out"] == 80
    assert version.measures["mae"] > 0
    assert version.measures["active_mae"] > 0
    model = load(kind, version.path)
    assert model.predict([LengthSample.objects.first().query]).tokens[0] >= 1
    if version.state == "shadow":
        assert versions.assigned() == (BUNDLED, version)
        versions.promote(version, "olga")
        assert versions.assigned() == (version, None)


def encoder_folder(family, folder):
    """Write a small random encoder of *family* and its tokenizer, as a checkpoint of the hub."""
    from transformers import BertConfig, BertModel, BertTokenizer, DistilBertConfig, DistilBertModel

    marks = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    words = (
        "write",
        "a",
        "long",
        "and",
        "essay",
        "about",
        "say",
        "yes",
        "or",
        "no",
        "is",
        "thing",
        *map(str, range(10)),
    )
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join((*marks, *words, *(f"##{letter}" for letter in "0123456789"))))
    shape = {"vocab_size": 64, "max_position_embeddings": 64}
    if family == "bert":
        more = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
        model = BertModel(BertConfig(**shape, **more))
    else:
        model = DistilBertModel(DistilBertConfig(**shape, dim=16, n_layers=3, n_heads=2, hidden_dim=32))
    model.save_pretrained(folder)
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


async def answer_of_subprocess(version, query):
    predictor = SubprocessPredictor(arguments=(version.kind, version.path))
    predictor.start()
    async with asyncio.timeout(120):
        await predictor.up.wait()
        answer = await predictor.ask(query, 5.0)
    await predictor.stop()
    return answer


@pytest.mark.nightly
@pytest.mark.gate
@pytest.mark.parametrize("family", ["distilbert", "bert"])
def test_the_papers_encoders_are_trained_and_serve_in_every_formulation(family, keeps, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "LENGTH_ENCODER", str(encoder_folder(family, tmp_path / family)))
    monkeypatch.setattr(training, "FITTING", replace(training.FITTING, layers=2))
    samples(keeps, 80)
    query = LengthSample.objects.first().query
    for kind in sorted(ON_ENCODER - {"ours"}):
        version = trained(kind)
        served = load(kind, version.path)
        assert type(served.encoder.module).__name__.lower() == f"{family}model"
        assert len(stack(served.encoder.module)) == 2
        tokens, quantiles = served.predict_one(query)
        assert 1 <= quantiles[0] <= quantiles[-1]
        if kind == "preserve":
            assert asyncio.run(answer_of_subprocess(version, query)).tokens == pytest.approx(tokens, rel=0.05)


def test_a_version_takes_the_place_of_the_shadow(keeps):
    samples(keeps, 60)
    first, second = trained("class-mean"), trained("prompt-buckets")
    assert versions.assigned().shadow == second
    first.refresh_from_db()
    assert (first.state, "takes its place" in first.note) == ("rejected", True)


def test_a_version_that_is_worse_than_its_predecessor_is_rejected(keeps, monkeypatch):
    samples(keeps, 60)
    trained("class-mean")
    monkeypatch.setattr(training, "_mae", lambda version, held_out: 0.5)
    version = trained("class-mean")
    assert version.state == "rejected"
    assert "class-mean 1" in version.note


def test_an_encoder_that_is_missing_is_named(keeps, monkeypatch, tmp_path):
    samples(keeps, 60)
    monkeypatch.setattr(settings, "LENGTH_ENCODER", str(tmp_path))
    with pytest.raises(ValueError, match="No encoder"):
        trained("preserve")


def test_what_cannot_be_trained_says_why(acme):
    samples(acme, 60)
    with pytest.raises(ActionError, match=r"0 samples with text.*keep prompts"):
        trained("preserve")
    with pytest.raises(ActionError, match="no length model 'oracle'"):
        trained("oracle")


def test_celery_trains_what_is_asked_for_and_what_is_due(keeps):
    samples(keeps, 60)
    assert tasks.train_length_model("class-mean", "olga", "now") == 1
    assert tasks.train_length_model("oracle", "olga", "now") == 0
    event = Event.objects.get(kind="length_version.training_failed")
    assert ("oracle" in event.reason, event.actor) == (True, "olga")
    assert tasks.train_length_model() == 2
    assert LengthVersion.objects.get(number=2).kind == "trees"
    assert not training.is_due(timezone.now())


def test_requested_work_waits_for_other_long_jobs(monkeypatch):
    again = []
    monkeypatch.setattr(
        tasks.train_length_model, "apply_async", lambda *given, **options: again.append((given, options))
    )
    with only_one(LONG_WORK):
        assert tasks.train_length_model() == 0
        assert tasks.train_length_model("trees", "olga", "now") == 0
    assert again == [((("trees", "olga", "now"),), {"countdown": tasks.AGAIN_S})]
