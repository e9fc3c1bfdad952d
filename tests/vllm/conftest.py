"""Real vLLM on CPU for tests: a tiny model, servers started by our own launcher, and the emulated twin of one of them.

vLLM lives in its own environment (`make vllm`): `VLLM_PYTHON`, or `.venv-vllm` in the project's folder. Without it the tests
are skipped, or fail when `REQUIRE_VLLM=1`. A server takes about a minute to start, so all tests of a session share it.
"""

import asyncio
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from workers.vllm.launcher import ProcessLauncher
from workers.vllm.spec import LaunchSpec

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 400.0
STOP_GRACE_S = 20.0

MODEL = "tiny"
CONTRACT = "contract"
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 4
MAX_NUM_QUEUED_REQS = 24
ENGINE_NICE = 5
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
FLAGS = ("--enforce-eager", "--dtype", "float32")
"""No compiling for a single start. Of bfloat16 vLLM computes attention with AMX where the processor has it, for which a
process needs leave from the kernel; oneDNN asks for it, but has no part in a model as small as ours, and the engine dies."""
IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""With `--distributed-executor-backend uni`: else an engine spins on a core while it waits for its computing process."""


@dataclass(frozen=True)
class Server:
    """A server under test: its base address without `/v1`, and a LoRA adapter that it can load."""

    kind: str
    url: str
    adapter: str


def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end from a fixture, in a separate thread: the tests' event loop is not ours to use."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(work)))
    thread.start()
    thread.join()
    return results[0]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of the vLLM environment."""
    python = os.environ.get("VLLM_PYTHON") or str(ROOT / ".venv-vllm/bin/python")
    if os.access(python, os.X_OK):
        return python
    missing = f"no vLLM at {python}: run `make vllm`, or set VLLM_PYTHON"
    if os.environ.get("REQUIRE_VLLM") == "1":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def tiny_model(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(vllm_python, folder)
    return folder


def write_tiny_model(vllm_python: str, folder: Path, *options: str) -> None:
    command = [vllm_python, "-m", "workers.vllm.tiny_model", str(folder), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter for the tiny Llama, all zeros."""
    folder = tmp_path_factory.mktemp("adapter")
    rank, hidden, queries = 4, 128, 128
    configuration = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
        "base_model_name_or_path": MODEL,
    }
    (folder / "adapter_config.json").write_text(json.dumps(configuration))
    # The safetensors format: the length of a JSON header, the header, the numbers.
    header: dict[str, object] = {}
    size = 0
    for layer in range(2):
        for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (queries, rank))):
            end = size + 4 * shape[0] * shape[1]
            header[f"base_model.model.model.layers.{layer}.self_attn.q_proj.{part}.weight"] = {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [size, end],
            }
            size = end
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return folder


@dataclass
class VllmFleet:
    """Real servers by name, all of the tiny model."""

    launcher: ProcessLauncher
    model: Path
    started: list[str]

    def start(
        self,
        name: str,
        *,
        model: str = MODEL,
        extra_args: tuple[str, ...] = (),
        core: int | None = None,
        **changes: Any,
    ) -> str:
        """Start a server that computes in its engine's process, on *core* if that is given; its address, at once."""
        spec = {
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_MODEL_LEN,
            "extra_args": (*FLAGS, "--distributed-executor-backend", "uni", *extra_args),
            **changes,
        }
        environment = {
            **IN_ONE_PROCESS,
            **({} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        wanted = LaunchSpec(name=name, model=model, source=str(self.model), environment=environment, **spec)
        launched = finish(self.launcher.start(wanted))
        self.started.append(name)
        return str(launched.url)

    def wait(self, name: str, url: str) -> None:
        """Wait until it answers, then let its engine give way; fail with the end of its log if it ends or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and finish(self.launcher.alive(name)):
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
                    assert response.status == 200
                self.give_way(name)
                return
            except OSError:
                time.sleep(0.5)
        log = self.launcher.log_file(name).read_text()[-3000:]
        pytest.fail(f"vLLM {name} did not start; the end of its log:\n{log}")

    def give_way(self, name: str) -> None:
        """Let the engine of server *name* give way to whatever else wants its core: its own HTTP process, the test.

        Else an engine that computes answers aborts and /metrics seconds late on a machine of two cores.
        """
        leader = json.loads(self.launcher.log_file(name).with_suffix(".json").read_text())["process_id"]
        is_there = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.getsid(int(folder.name)) == leader and "VLLM::EngineCore" in (folder / "cmdline").read_text():
                    for thread in (folder / "task").iterdir():
                        os.setpriority(os.PRIO_PROCESS, int(thread.name), ENGINE_NICE)
                    is_there = True
        assert is_there, f"server {name} has no process called VLLM::EngineCore"

    def stop(self) -> None:
        for name in self.started:
            finish(self.launcher.stop(name, grace_s=STOP_GRACE_S))


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM raise as Ctrl-C does, so that fixtures stop their servers: they would outlive us."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def servers_of(vllm_python: str, run_folder: Path, model: Path) -> Iterator[VllmFleet]:
    """Servers of *model*, started on demand and stopped at the end."""
    fleet = VllmFleet(ProcessLauncher(vllm_python, run_folder), model, [])
    with interruptible():
        try:
            yield fleet
        finally:
            fleet.stop()


@contextmanager
def slow_server(vllm_python: str, folder: Path, *options: str, **spec: Any) -> Iterator[str]:
    """Return the address of a server of a larger model (*options* of `tiny_model`), whose
    steps dominate a request's time.
    """
    write_tiny_model(vllm_python, folder / "model", *options)
    with servers_of(vllm_python, folder / "run", folder / "model") as fleet:
        url = fleet.start(folder.name, **spec)
        fleet.wait(folder.name, url)
        yield url


@pytest.fixture(scope="session")
def vllm_fleet(vllm_python: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    """The servers that tests share."""
    with servers_of(vllm_python, tmp_path_factory.mktemp("vllm"), tiny_model) as fleet:
        yield fleet


def profile(t0_s: float, prefill_s: float, decode_s: float, decode_s_per_sequence: float) -> dict[str, float]:
    """A performance profile of an emulated server."""
    return {
        "prefill_t0_s": t0_s,
        "prefill_a_s": prefill_s,
        "prefill_b_s_per_token": 1e-5,
        "prefill_c_s_per_token2": 0.0,
        "decode_a_s": decode_s,
        "decode_b_s_per_sequence": decode_s_per_sequence,
        "decode_c_s_per_token": 0.0,
    }


def emulated(**changes: Any) -> "tuple[subprocess.Popen[str], str]":
    """Run an emulator process with one server like the real one, except for *changes* of
    its settings; yield its address.
    """
    command = [sys.executable, "-m", "workers.emulator", "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"http://\S+", line)
    assert match, line
    body = {
        "model": MODEL,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_queued_reqs": MAX_NUM_QUEUED_REQS,
        "enable_prefix_caching": True,
        "output_median_tokens": 300,
        "profile": profile(0.002, 0.001, 0.001, 1e-5),
        **changes,
    }
    request = urllib.request.Request(
        f"{match[0]}/emulator/instances/contract", data=json.dumps(body).encode(), method="PUT"
    )
    with urllib.request.urlopen(request) as response:
        return process, str(json.load(response)["url"])


@pytest.fixture(scope="session")
def vllm_server(vllm_fleet: VllmFleet, adapter: Path) -> Server:
    """The one real server of the gate, shared by every test that does not need another."""
    flags = ("--enable-lora", "--max-lora-rank", "8", *TOOLS)
    url = vllm_fleet.start(CONTRACT, max_num_queued_reqs=MAX_NUM_QUEUED_REQS, extra_args=flags)
    vllm_fleet.wait(CONTRACT, url)
    return Server("vllm", url, str(adapter))


@pytest.fixture(scope="session", params=["emulator", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request: pytest.FixtureRequest, adapter: Path) -> Iterator[Server]:
    """A server that should behave like vLLM: the emulated one, and vLLM itself."""
    if request.param == "vllm":
        yield request.getfixturevalue("vllm_server")
        return
    process, url = emulated(enable_auto_tool_choice=True)
    with process:
        yield Server("emulator", url, str(adapter))
        process.terminate()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield session
