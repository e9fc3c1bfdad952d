"""The tiny model and the module that writes it."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from workers.vllm.tiny_model import CHAT_TEMPLATE, main

WITHOUT_BOTH = importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None
without = pytest.mark.skipif(not WITHOUT_BOTH, reason="torch and transformers are installed here")


@without
def test_without_them_the_module_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m")]) == 1
    assert "make vllm" in capsys.readouterr().err


@pytest.mark.vllm
def test_what_it_writes(tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"]) == (2, 128)
    vocabulary = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["vocab"]
    assert config["vocab_size"] == len(vocabulary) == 1024
    assert (tiny_model / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@pytest.mark.vllm
def test_the_same_seed_writes_the_same_weights(tiny_model: Path, vllm_python: str, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        command = [vllm_python, "-m", "workers.vllm.tiny_model", str(tmp_path / str(seed)), "--seed", str(seed)]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
        written = (tmp_path / str(seed) / "model.safetensors").read_bytes()
        assert (written == (tiny_model / "model.safetensors").read_bytes()) is same
