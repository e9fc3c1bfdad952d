"""Torch and transformers are an extra: nothing on the default path imports them, and what needs them rests and says so."""

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.experiments.registry import EXPERIMENTS
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.lengths import services as versions
from controlplane.lengths import training
from controlplane.lengths.models import BUNDLED, LengthVersion, VersionState
from controlplane.planning import scenario
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.management.commands import backtest
from controlplane.simulation.forecasts import forecaster_named
from controlplane.simulation.planner import _check_forecasters
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.changes.policies import PolicyChange
from forecasting import models_extra
from forecasting.files import write_state
from forecasting.lengths import ON_ENCODER
from forecasting.models_extra import ModelsExtraMissing
from forecasting.workload import BEST, FORECASTERS, unavailable_reason, usable
from scheduling.simulation.scenario import ScenarioError, load_scenario
from tests.forecasting.lengths.made import samples
from tests.inventory import *  # noqa: F403 (fixtures)
from tests.planning.conftest import NOW, make_minutes, minute_windows  # noqa: F401 (fixtures)
from tests.without_models_extra import SENTENCE, without_models_extra  # noqa: F401 (fixture)
from workers.vllm import model_shape

ROOT = Path(__file__).parents[1]
ENCODER_KIND = "ssjf-reg-l1"

DEFAULT_PATH = """
import sys
from importlib import import_module
import django
django.setup()
import controlplane.asgi
from django.core.management import get_commands
from django.urls import get_resolver
get_resolver().url_patterns  # every page and every router
import workers.beat
from workers.celery import app
app.loader.import_default_modules()
for name, application in get_commands().items():
    if str(application).startswith("controlplane"):
        import_module(f"{application}.management.commands.{name}")
import numpy as np
from forecasting.lengths import Trees
from forecasting.workload import BEST, FORECASTERS, Series
forecaster = FORECASTERS[BEST]()
forecaster.fit(Series(0.0, 60.0, 100.0 + np.arange(60.0) % 7, "demand"))
forecaster.predict(6)
from tests.forecasting.lengths.made import samples
Trees().fit(samples(60))
import controlplane.simulation.planner
print(" ".join(name for name in ("torch", "transformers") if name in sys.modules))
"""


@pytest.mark.nightly
def test_the_default_path_imports_neither(tmp_path: Path) -> None:
    """Web, Celery's tasks, every command, a forecast and a training, as `make run` has them."""
    environment = {
        **os.environ, "DJANGO_SETTINGS_MODULE": "controlplane.settings", "PILOTHOUSE_DEBUG": "1",
        "PILOTHOUSE_STATE_DIR": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", DEFAULT_PATH], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


@pytest.mark.usefixtures("without_models_extra")
def test_one_place_knows_whether_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not models_extra.is_installed()
    assert models_extra.missing_for("A thing") == f"A thing {SENTENCE}."
    with pytest.raises(ModelsExtraMissing, match="A thing needs torch"):
        models_extra.require("A thing")
    monkeypatch.setattr(models_extra, "find_spec", lambda name: object())
    assert models_extra.is_installed(), "without a restart"
    monkeypatch.setattr(models_extra, "find_spec", lambda name: None)
    assert models_extra.missing_for("A thing") == "", "and then it is not looked for again"
    assert [name for name in FORECASTERS if unavailable_reason(name)] == []


@pytest.mark.usefixtures("without_models_extra")
class TestForecasts:
    def test_the_mlstm_alone_rests(self) -> None:
        assert [name for name in FORECASTERS if unavailable_reason(name)] == ["mlstm"]
        assert (usable("mlstm"), usable(""), usable("ets"), usable("oracle")) == (BEST, BEST, "ets", "oracle")

    @pytest.mark.django_db
    @pytest.mark.usefixtures("minute_windows")
    def test_the_best_stands_in_for_it_and_its_files_stay(self, make_minutes, settings, tmp_path) -> None:  # noqa: F811
        settings.FORECASTER = "mlstm"
        kept = tmp_path / "forecasters" / "mlstm" / "kept.npz"
        kept.parent.mkdir(parents=True)
        kept.write_bytes(b"learned before")
        make_minutes(40)
        said = {(row.forecaster, row.note) for row in forecasts.make_forecasts(NOW)}
        assert {name for name, _ in said} == {BEST}
        assert all(note.startswith(f"The forecaster mlstm {SENTENCE}. Until then blend stands in.") for _, note in said)
        assert forecasts.fit_forecasters(NOW) == 0
        assert not Event.objects.filter(kind=forecasts.FAILED_KIND).exists()
        assert kept.read_bytes() == b"learned before"

    @pytest.mark.django_db
    def test_backtests_leave_it_out(self, make_minutes, monkeypatch) -> None:  # noqa: F811
        make_minutes(120)
        with pytest.raises(CommandError, match="mlstm needs torch") as stopped:
            call_command("backtest", "--forecasters", "ets", "mlstm", "--window", "60")
        assert stopped.value.returncode == 2
        judged: list[list[str]] = []
        monkeypatch.setattr(backtest, "judge", lambda demand, names, *_: judged.append(names) or ([], []))
        out = StringIO()
        call_command("backtest", "--window", "60", "--json", stdout=out)
        assert json.loads(out.getvalue())["left_out"] == {"mlstm": f"The forecaster mlstm {SENTENCE}."}
        assert judged == [[name for name in FORECASTERS if name != "mlstm"]]


@pytest.mark.usefixtures("without_models_extra")
class TestSimulations:
    def test_a_scenario_that_names_it_is_refused_with_its_line(self, tmp_path: Path) -> None:
        text = (
            (ROOT / "docs/scenarios/pilothouse.toml").read_text().replace('forecaster = "ets"', 'forecaster = "mlstm"')
        )
        path = tmp_path / "mine.toml"
        path.write_text(text)
        with pytest.raises(
            ScenarioError, match=r"mine.toml, line \d+, forecast.forecaster: The forecaster mlstm needs"
        ):
            _check_forecasters(load_scenario(path), path)
        with pytest.raises(ValueError, match="run `make models`"):
            forecaster_named("mlstm")

    def test_a_future_that_names_it_is_refused(self) -> None:
        with pytest.raises(ChangeError, match="value: The forecaster mlstm needs torch"):
            PolicyChange(part="forecaster", value="mlstm").apply({"models": {"m": {}}})

    @pytest.mark.parametrize("arguments", [("preserve-scaling",), ("lengths",), ("bursts", "--forecaster", "mlstm")])
    def test_an_experiment_ends_before_it_begins(self, arguments: tuple[str, ...], monkeypatch) -> None:
        kind = type(EXPERIMENTS[arguments[0]])
        monkeypatch.setattr(kind, "run", lambda *_: pytest.fail("it ran"))
        with pytest.raises(CommandError, match="run `make models`") as stopped:
            call_command("reproduce", *arguments)
        assert stopped.value.returncode == 2

    def test_an_experiment_runs_that_does_without(self) -> None:
        experiment = EXPERIMENTS["preserve-scaling"]
        experiment.check_installed(experiment.settings({"forecaster": "ets"}))


@pytest.mark.django_db
@pytest.mark.usefixtures("without_models_extra")
class TestLengths:
    @pytest.fixture(autouse=True)
    def state_folder(self, settings, tmp_path: Path) -> Path:
        settings.STATE_DIR = tmp_path
        (tmp_path / "lengths").mkdir()
        return tmp_path

    @pytest.fixture
    def trained(self, state_folder: Path) -> LengthVersion:
        """A version on an encoder, trained while the extra was there."""
        write_state(state_folder / "lengths" / "one.npz", {"model": ENCODER_KIND, "version": 2})
        return LengthVersion.objects.create(
            number=1, kind=ENCODER_KIND, state=VersionState.ACTIVE, file="lengths/one.npz", trained_at=timezone.now()
        )

    def test_a_version_on_an_encoder_rests_and_stays(self, trained: LengthVersion, monkeypatch) -> None:
        assert versions.assigned() == (BUNDLED, None)
        trained.refresh_from_db()
        assert trained.state == VersionState.ACTIVE
        monkeypatch.setattr(models_extra, "find_spec", lambda name: object())
        assert versions.in_use() == trained

    def test_one_in_shadow_predicts_no_more_and_cannot_be_promoted(self, trained: LengthVersion) -> None:
        LengthVersion.objects.update(state=VersionState.SHADOW)
        assert versions.assigned().shadow is None
        with pytest.raises(ActionError, match=SENTENCE):
            versions.promote(LengthVersion.objects.get(), "somebody")

    def test_its_training_is_refused_where_it_is_asked_for(self, operator) -> None:
        with pytest.raises(ActionError, match=f"The length model {ENCODER_KIND} {SENTENCE}"):
            training.ask(operator, kind=ENCODER_KIND)

    def test_one_that_waited_fails_with_the_sentence(self, operator) -> None:
        assert training.run_requested(ENCODER_KIND, operator.get_username(), "") == 0
        event = Event.objects.get(kind="length_version.training_failed")
        assert event.reason == f"The length model {ENCODER_KIND} {SENTENCE}."

    def test_kinds_without_an_encoder_are_trained_as_ever(self, settings, monkeypatch) -> None:
        monkeypatch.setattr(training, "torch_threads", lambda count: pytest.fail("it wants torch"))
        monkeypatch.setattr(training, "_mae", lambda version, held_out: None)
        settings.LENGTH_TRAIN_SAMPLES = 20
        monkeypatch.setattr(training, "stored", lambda kind: samples(60))
        version = training.train(timezone.now(), kind="class-mean")
        assert (version.kind, version.state) == ("class-mean", VersionState.SHADOW)

    def test_every_kind_on_an_encoder_and_no_other(self) -> None:
        assert "trees" not in ON_ENCODER
        assert {"ours", "preserve", ENCODER_KIND} <= ON_ENCODER


@pytest.mark.usefixtures("without_models_extra")
def test_sizes_of_a_model_are_asked_for_instead(tmp_path: Path) -> None:
    with pytest.raises(model_shape.ShapeError, match=r"Reading the sizes of .* run `make models`, or give them\."):
        model_shape.read(str(tmp_path))


@pytest.mark.django_db
@pytest.mark.usefixtures("without_models_extra")
def test_a_fork_of_the_live_fleet_uses_the_stand_in_forecaster(settings, deployment, monkeypatch) -> None:
    settings.FORECASTER = "mlstm"
    fleet = type("Fleet", (), {"deployments": {}})()
    made = scenario.scaling(fleet, {"endpoints": [{"model": "llama-3.1-8b", "region": "us-east"}]})
    assert made["endpoints"][0]["forecaster"] == BEST
