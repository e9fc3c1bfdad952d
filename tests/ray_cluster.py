"""A real Ray cluster on this machine: a head, raylets as machines of their own, and an environment that has Ray.

Ray is taken from the environment of the tests where it is installed, else from `.venv-ray`, which is made at the first use.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
OBJECTS_BYTES = 80_000_000  # the least that Ray takes
STARTS_WITHIN_S = 600.0


def ray_python() -> str:
    """Return a Python that has Ray and the packages of this one."""
    if importlib.util.find_spec("ray"):
        return sys.executable
    folder = ROOT / ".venv-ray"
    python = folder / "bin" / "python"
    ours = next((folder / "lib").glob("python*/site-packages"), Path()) / "ours.pth"
    if not ours.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "ray>=2.50"], check=True)
        packages = next((folder / "lib").glob("python*/site-packages"))
        (packages / "ours.pth").write_text("\n".join(site.getsitepackages()))
    return str(python)


class RayCluster:
    """Processes by the names of their machines. `stop` ends all of them, and their servers with them."""

    def __init__(self, python: str, state: Path, redis_url: str = "", **environment: str) -> None:
        self._ray = str(Path(python).with_name("ray"))
        # Paths of sockets are short.
        self._folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        self._state = state
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("RAY_", "PYTHONPATH", "DJANGO_"))
            },
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "600",  # not 30, and not 60 for the next, for a busy machine
            "RAY_gcs_server_request_timeout_seconds": "600",
            "PILOTHOUSE_STATE_DIR": str(state),
            **environment,
        }
        # A lost machine is given up after 8 s, not 15; after 2 s one that lives was, on a busy machine.
        self._for_head = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "8"}
        if redis_url:
            self._for_head |= {
                "RAY_REDIS_ADDRESS": redis_url.rpartition("/")[0],
                "RAY_external_storage_namespace": f"test{self._port}",
            }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def head(self) -> "RayCluster":
        """Start the head, on which nothing can be started; again after it was killed."""
        (Path(self._folder) / "ray_current_cluster").unlink(missing_ok=True)
        flags = ["--head", "--port", str(self._port), "--temp-dir", self._folder, "--include-dashboard", "false"]
        return self._start("head", 0, flags, self._for_head)

    def machine(self, name: str, gpus: int, **resources: int) -> "RayCluster":
        """Start a raylet with *gpus*, and *resources* whose names have a colon for each two underscores."""
        words = ", ".join(
            f'"{each.replace("__", ":").replace("_", "-")}": {count}' for each, count in resources.items()
        )
        flags = ["--address", self.address, "--num-gpus", str(gpus), "--resources", f"{{{words}}}"]
        return self._start(name, 1, flags, {})

    def kill(self, name: str) -> None:
        """Kill the processes that Ray started for the machine, at once, as a loss of power does: its raylet, on the head
        its tables too.
        """
        process = self._processes.pop(name)
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def stop(self) -> None:
        for name in [*self._processes]:
            self.kill(name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, name: str, cpus: int, flags: list[str], environment: dict[str, str]) -> "RayCluster":
        log = self._state / f"ray-{name}.log"
        command = [self._ray, "start", "--block", "--node-name", name, "--num-cpus", str(cpus), "--disable-usage-stats"]
        with log.open("wb") as output:
            self._processes[name] = subprocess.Popen(
                [*command, "--object-store-memory", str(OBJECTS_BYTES), *flags],
                env={**self._environment, **environment},
                cwd="/",
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + STARTS_WITHIN_S
        while "Ray runtime started" not in log.read_text():
            assert self._processes[name].poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return self
