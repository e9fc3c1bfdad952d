"""A simulation whose output lengths are expected as a version of the length model predicts them."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from django.conf import settings
from django.core.management import CommandError, call_command

from controlplane.lengths.models import LengthVersion
from controlplane.simulation.lengths import predicted_by
from forecasting.lengths import Fitting, LengthQuery
from forecasting.lengths.baselines import PromptBuckets
from forecasting.lengths.encoder import TINY
from forecasting.lengths.papers import RegressionL1
from scheduling.simulation.scenario import load_scenario
from scheduling.simulation.staging import stage
from tests.forecasting.lengths.made import samples
from tests.scheduling.simulation.test_scenario import RIGHT

pytestmark = pytest.mark.django_db


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(settings, "STATE_DIR", tmp_path)
    (tmp_path / "lengths").mkdir()
    path = tmp_path / "scenario.toml"
    path.write_text(RIGHT)
    return path


def version(number, model):
    file = f"lengths/{model.name}-{number}.npz"
    model.save(settings.STATE_DIR / file)
    return LengthVersion.objects.create(number=number, kind=model.name, file=file)


@pytest.fixture
def staged(scenario):
    made = stage(load_scenario(scenario), scenario, 1)
    head = made.requests._replace(**{
        name: column[:40] for name, column in made.requests._asdict().items() if not name.startswith("prefix")
    })  # fmt: skip
    return replace(made, requests=head)


def test_a_version_that_reads_no_prompt_predicts_by_sizes(staged) -> None:
    model = PromptBuckets().fit(samples(100))
    version(1, model)
    expected = predicted_by(1, staged).requests.predicted_tokens
    queries = [LengthQuery("", int(tokens)) for tokens in staged.requests.prompt_tokens]
    assert expected.tolist() == np.rint(model.predict(queries).tokens).tolist()
    assert expected.dtype == np.int32
    assert (predicted_by(0, staged).requests.predicted_tokens >= 1).all()  # the bundled trees


def test_a_version_that_reads_prompts_needs_them(staged) -> None:
    version(2, RegressionL1(Fitting(TINY, tuned=16, read=30, head_epochs=1, most_tokens=16)).fit(samples(60)))
    with pytest.raises(ValueError, match="ssjf-reg-l1 2 reads prompts, and the trace has none"):
        predicted_by(2, staged)
    with pytest.raises(ValueError, match="There are 1 prompts for 40 requests"):
        predicted_by(2, staged, ["one"])
    texts = [f"Write an essay of {number} words" for number in range(40)]
    assert (predicted_by(2, staged, texts).requests.predicted_tokens >= 1).all()
    with pytest.raises(ValueError, match="There is no version 7"):
        predicted_by(7, staged)


def test_the_command_takes_a_version(scenario, tmp_path) -> None:
    version(1, PromptBuckets().fit(samples(100)))
    out = StringIO()
    call_command("simulate", str(scenario), "--json", "--length-version=1", stdout=out)
    assert json.loads(out.getvalue())["requests"] > 0
    for wrong, message in (
        (["--length-version=9"], "no version 9"),
        (["--texts=none"], "give --length-version"),
        (["--length-version=1", "--texts=none"], "cannot be read"),
    ):
        with pytest.raises(CommandError, match=message):
            call_command("simulate", str(scenario), *wrong)
