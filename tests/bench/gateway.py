"""Overhead of the gateway over calling the backend directly: one run, one machine, a backend that answers at once.

Keys, queue, ledger and heartbeats are on, as in production; SQLite. For comparison, the same run measures a bare ASGI +
aiohttp proxy that does none of that, and with --litellm PYTHON or --vllm-router PROGRAM (from their own environments)
those too.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvloop

from tests.bench._load import drive

ROOT = Path(__file__).parents[2]
KEY = "ph_bench-key"
LOOP = "controlplane.listening:create_loop"
CHUNKS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=5.0, help="of load for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="each measured in turn; medians are reported")
    parser.add_argument("--tokens", type=int, default=75_000, help="of a long body; half of those are streamed")
    parser.add_argument("--litellm", help="Python of an environment with litellm[proxy]")
    parser.add_argument("--vllm-router", help="the vllm-router program")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def process(arguments: list[str], port: int, environment: dict[str, str], wait_s: float = 60.0):
    """Run a server until it listens on *port*; stop it at the end."""
    environment = {"PILOTHOUSE_DRAIN_S": "0"} | environment
    child = subprocess.Popen(arguments, cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + wait_s
        while True:
            if child.poll() is not None:
                raise RuntimeError(f"{' '.join(arguments[:4])} ended with {child.returncode}")
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{' '.join(arguments[:4])} does not listen")
            time.sleep(0.1)
        yield child
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def cpu_s(pid: int) -> float:
    """Return the processor seconds used by a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def seed(environment: dict[str, str], urls: dict[str, str]) -> None:
    """Migrate a new database and fill it with one model on instances at *urls*, by name."""
    code = (
        "import django; django.setup()\n"
        "from django.core.management import call_command\n"
        "call_command('migrate', verbosity=0)\n"
        "from types import SimpleNamespace\n"
        "from tests.gateway.rows import make_rows\n"
        f"urls = {urls!r}\n"
        "make_rows([SimpleNamespace(name=name, url=url) for name, url in urls.items()], regions=['east'] * len(urls),"
        f" max_num_seqs={1024 // len(urls) * 2}, queue_bound=4096, secret='{KEY}', max_concurrent_requests=4096)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | environment, check=True)


def uvicorn(target: str, port: int, http: str = "controlplane.listening:HttpProtocol") -> list[str]:
    return [sys.executable, "-m", "uvicorn", target, "--port", str(port), "--no-access-log", "--log-level", "warning",
            "--loop", LOOP, "--http", http, "--lifespan", "on", "--timeout-keep-alive", "75"]  # fmt: skip


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(port: int, pid: int | None, seconds: float, tokens: int) -> dict[str, float]:
    await drive(port, KEY, connections=8, seconds=0.5)  # warm
    alone = await drive(port, KEY, connections=1, seconds=seconds, most=2000)
    cpu_begin_s = cpu_s(pid) if pid else 0.0
    load = await drive(port, KEY, connections=32, seconds=seconds)
    cpu_before_s = cpu_s(pid) if pid else 0.0
    streams = await drive(port, KEY, connections=16, seconds=seconds, streams=1.0)
    cpu_after_s = cpu_s(pid) if pid else 0.0
    long = await drive(port, KEY, connections=16, seconds=seconds, streams=0.5, tokens=tokens)
    result = {
        "requests_per_s": load["per_s"],
        "p50_ms": alone["p50_ms"],
        "p99_ms": alone["p99_ms"],
        "loaded_p99_ms": load["p99_ms"],
        "streams_per_s": streams["per_s"],
        "long_per_s": long["per_s"],
        "long_p50_ms": long["p50_ms"],
        "long_p99_ms": long["p99_ms"],
    }
    if pid:
        result["long_cpu_ms_per_answer"] = (cpu_s(pid) - cpu_after_s) * 1e3 / long["answers"]
        result["rss_mb"] = rss_mb(pid)
        result["cpu_us_per_answer"] = (cpu_before_s - cpu_begin_s) * 1e6 / load["answers"]
        result["cpu_us_per_chunk"] = (cpu_after_s - cpu_before_s) * 1e6 / (streams["answers"] * CHUNKS)
    return result


def median(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: sorted(result[key] for result in rounds)[len(rounds) // 2] for key in rounds[0]}


def run(options: argparse.Namespace) -> dict[str, Any]:
    ports = {name: free_port() for name in ("backend", "gateway", "plain_proxy", "litellm", "vllm_router")}
    with tempfile.TemporaryDirectory(prefix="pilothouse-bench-") as folder:
        environment = {
            "PILOTHOUSE_SECRET_KEY": "bench",
            "PILOTHOUSE_STATE_DIR": folder,
            "REDIS_URL": "redis://127.0.0.1:1/0",
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PYTHONWARNINGS": "ignore",
            "BACKENDS": f"http://127.0.0.1:{ports['backend']}",
        }
        backend = [sys.executable, "-m", "tests.bench._backend", str(ports["backend"]), str(CHUNKS)]
        servers = {
            "gateway": uvicorn("controlplane.asgi:application", ports["gateway"]),
            "plain_proxy": uvicorn("tests.bench._plain_proxy:app", ports["plain_proxy"], "httptools"),
        }
        if options.litellm:
            servers["litellm"] = litellm(options.litellm, Path(folder), ports)
        if options.vllm_router:
            servers["vllm_router"] = [
                options.vllm_router, "--host", "127.0.0.1", "--port", str(ports["vllm_router"]),
                "--worker-urls", f"http://127.0.0.1:{ports['backend']}", "--policy", "round_robin",
            ]  # fmt: skip
        results: dict[str, list[dict[str, float]]] = {"direct": [], **{name: [] for name in servers}}
        with process(backend, ports["backend"], environment):
            seed(environment, {"m-0": f"http://127.0.0.1:{ports['backend']}"})
            for _ in range(options.rounds):
                results["direct"].append(uvloop.run(measure(ports["backend"], None, options.seconds, options.tokens)))
                for name, arguments in servers.items():
                    ours = environment if name in ("gateway", "plain_proxy") else {}
                    with process(arguments, ports[name], ours, wait_s=120.0) as child:
                        time.sleep(1.5)  # the gateway reads its first heartbeat
                        results[name].append(
                            uvloop.run(measure(ports[name], child.pid, options.seconds, options.tokens))
                        )
    medians = {name: median(rounds) for name, rounds in results.items()}
    direct, gateway = medians["direct"], medians["gateway"]
    return {
        "requests_per_s": gateway["requests_per_s"],
        "streams_per_s": gateway["streams_per_s"],
        "added_p50_ms": gateway["p50_ms"] - direct["p50_ms"],
        "added_p99_ms": gateway["p99_ms"] - direct["p99_ms"],
        "cpu_us_per_chunk": gateway["cpu_us_per_chunk"],
        "long_share_of_plain_proxy": gateway["long_per_s"] / medians["plain_proxy"]["long_per_s"],
        "share_of_plain_proxy": gateway["requests_per_s"] / medians["plain_proxy"]["requests_per_s"],
        **medians,
    }


def litellm(python: str, folder: Path, ports: dict[str, int]) -> list[str]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
        f"      api_base: http://127.0.0.1:{ports['backend']}/v1\n      api_key: none\n"
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"  # it refuses to start without a key
    )
    program = str(Path(python).with_name("litellm"))
    return [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(ports["litellm"])]
