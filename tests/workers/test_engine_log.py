"""What a server's log says. The files in `data/logs` were written by vLLM 0.32 on a CPU; each is named after its end."""

from pathlib import Path

import pytest

from workers.vllm import engine_log
from workers.vllm.engine_log import last_lines, root_error, rotate_log, shorten, startup

LOGS = Path(__file__).parent / "data/logs"

# A start on GPUs, in the words of vLLM 0.32's source: what a CPU does not print.
GPU_START = """
(APIServer pid=1) INFO 11-22 06:59:23 [api_utils.py:286] non-default args: {'model': 'm'}
(EngineCore pid=2) INFO 11-22 06:59:52 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(Worker pid=3) INFO 11-22 07:00:08 [gpu_model_runner.py:4980] Starting to load model m...
Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:02<00:02,  1.1s/it]
(Worker pid=3) INFO 11-22 07:00:20 [gpu_model_runner.py:5150] Model loading took 14.99 GiB memory and 4.211 seconds
(Worker pid=3) INFO 11-22 07:00:30 [backends.py:1167] Dynamo bytecode transform time: 4.91 s
(Worker pid=3) INFO 11-22 07:00:50 [gpu_worker.py:760] Available KV cache memory: 52.31 GiB
(EngineCore pid=2) INFO 11-22 07:00:50 [kv_cache_utils.py:2327] GPU KV cache size: 428,512 tokens, Maximum concurrency
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  0%| | 0/67\rCapturing CUDA graphs (decode, FULL):  41%|## | 27/67
(Worker pid=3) INFO 11-22 07:01:02 [gpu_model_runner.py:6582] Graph capturing finished in 12 secs, took 0.61 GiB
(EngineCore pid=2) INFO 11-22 07:01:03 [core.py:402] init engine (profile, create kv cache, warmup model) took 42.10 s
(APIServer pid=1) INFO 11-22 07:01:04 [entry.py:140] Starting vLLM server on http://0.0.0.0:8000
INFO:     Application startup complete.
""".strip().split("\n")
PHASES = [
    "Reading the configuration",
    "Starting the engine",
    "Loading weights",
    "Loading weights, 50%",
    "Weights loaded",
    "Compiling",
    "Allocating the KV cache",
    "Allocating the KV cache",
    "Capturing graphs, 41%",
    "Engine ready",
    "Engine ready",
    "Starting the API server",
    "Ready",
]

FAILED_ENGINE = """
(EngineCore pid=2) ERROR 11-22 07:00:50 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-22 07:00:50 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-22 07:00:50 [core.py:1510]   File "core.py", line 1500, in run_engine_core
(EngineCore pid=2) ERROR 11-22 07:00:50 [core.py:1510] ValueError: To serve at least one request, 1.0 GiB is needed.
(EngineCore pid=2) Process EngineCore:
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)   File "process.py", line 314, in _bootstrap
(EngineCore pid=2) ValueError: To serve at least one request, 1.0 GiB is needed.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1)   File "core_client.py", line 1, in launch
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
SURVIVED = """
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'survived'
INFO:     127.0.0.1:48928 - "POST /v1/completions HTTP/1.1" 200 OK
"""
CHAINED = """
Traceback (most recent call last):
  File "a.py", line 1, in f
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "b.py", line 1, in g
RuntimeError: the model cannot be loaded
"""


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_each_phase_of_a_start_on_gpus() -> None:
    assert [startup("\n".join(GPU_START[: count + 1])) for count in range(len(GPU_START))] == PHASES


def test_a_real_start_runs_through_its_phases() -> None:
    lines = log("engine-killed").splitlines()
    seen = list(dict.fromkeys(startup("\n".join(lines[:count])) for count in range(len(lines) + 1)))
    assert seen[0] == "Starting"
    assert seen[-1] == "Ready"
    assert [phase for phase in seen if phase.startswith("Loading weights")][-1] == "Loading weights, 100%"
    assert "Allocating the KV cache" in seen


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (log("no-such-model"), "HFValidationError: Repo id must be in the form"),
        (log("context-too-long"), "ValidationError: User-specified max_model_len (40960) is greater than the derived"),
        (log("unknown-argument"), "unrecognized arguments: --no-such-flag"),
        (log("engine-killed"), "engine core exited unexpectedly"),
        (FAILED_ENGINE, "ValueError: To serve at least one request, 1.0 GiB is needed."),
        (CHAINED, "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        (SURVIVED + FAILED_ENGINE, "ValueError: To serve"),
    ],
    ids=[
        "model",
        "context",
        "argument",
        "killed",
        "the cause, not who waited",
        "first of a chain",
        "not a survived one",
    ],
)
def test_the_error_that_ended_a_server(text: str, error: str) -> None:
    assert root_error(text).startswith(error)


def test_a_log_without_errors_has_none() -> None:
    assert root_error("\n".join(GPU_START)) == root_error("") == ""


def test_last_lines_are_what_a_terminal_shows(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n\nloading 0%\rloading 50%\nlast\n")
    assert last_lines(path, 2) == ["loading 50%", "last"]
    assert last_lines(tmp_path / "none.log", 2) == []


def test_each_start_has_a_separate_log_and_two_earlier_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for number in range(4):
        rotate_log(path)
        path.write_text(str(number))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "a.log": "3",
        "a.log.1": "2",
        "a.log.2": "1",
    }


def test_a_long_log_is_cut_while_the_server_writes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as stream:
        stream.write(b"x" * 5000 + b"end")
        assert not shorten(path, 10_000)
        assert shorten(path, 1000)
        assert path.stat().st_size == 0
        stream.write(b"more")
    assert path.read_bytes() == b"more"
    assert (tmp_path / "a.log.1").read_bytes().endswith(b"xend")
    assert (tmp_path / "a.log.1").stat().st_size == 1000


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("first\n" * 100_000 + "last\n")
    assert len(engine_log.tail(path)) <= engine_log.TAIL_BYTES
    assert last_lines(path, 1) == ["last"]
