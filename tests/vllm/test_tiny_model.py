"""The tiny model and the command that writes it."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from pytest_django import Settings

from tests.without_models_extra import without_models_extra  # noqa: F401 (fixture)
from workers.vllm import tiny_model

WITHOUT_BOTH = importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None
without = pytest.mark.skipif(not WITHOUT_BOTH, reason="torch and transformers are installed here")


@pytest.mark.usefixtures("without_models_extra")
def test_without_them_the_command_says_what_to_do(tmp_path: Path, settings: Settings) -> None:
    settings.VLLM_PYTHON = ""
    with pytest.raises(CommandError, match="make vllm"):
        call_command("make_tiny_model", str(tmp_path / "m"))


@without
def test_a_wrong_python_is_said(tmp_path: Path, settings: Settings) -> None:
    settings.VLLM_PYTHON = str(tmp_path / "none")
    with pytest.raises(CommandError, match="cannot be started"):
        call_command("make_tiny_model", str(tmp_path / "m"))
    settings.VLLM_PYTHON = sys.executable  # they are not in there either
    with pytest.raises(CommandError, match="could not write the model"):
        call_command("make_tiny_model", str(tmp_path / "m"))


@without
def test_without_them_the_module_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_model.main([str(tmp_path / "m")]) == 1
    assert "make vllm" in capsys.readouterr().err


@pytest.mark.vllm
def test_the_command_writes_a_model(
    vllm_python: str, tmp_path: Path, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings.VLLM_PYTHON = vllm_python
    call_command("make_tiny_model", str(tmp_path / "m"))
    assert "Wrote a tiny Llama" in capsys.readouterr().out
    config = json.loads((tmp_path / "m/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 128)
    assert (
        config["vocab_size"] == len(json.loads((tmp_path / "m/tokenizer.json").read_text())["model"]["vocab"]) == 1024
    )
    assert (tmp_path / "m/chat_template.jinja").read_text() == tiny_model.CHAT_TEMPLATE


@pytest.mark.vllm
def test_the_same_seed_writes_the_same_weights(tiny_model: Path, vllm_python: str, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        command = [vllm_python, "-m", "workers.vllm.tiny_model", str(tmp_path / str(seed)), "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
        written = (tmp_path / str(seed) / "model.safetensors").read_bytes()
        assert (written == (tiny_model / "model.safetensors").read_bytes()) is same
