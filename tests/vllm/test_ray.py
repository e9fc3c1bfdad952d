"""One instance over two machines of a Ray cluster: real vLLM on CPUs, pipeline parallel."""

import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.ray_cluster import RayCluster, ray_python
from tests.vllm.conftest import MODEL, ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
START_LIMIT_S = 540.0
START = """
import asyncio, sys
from workers.ray.launcher import RayLauncher
from workers.vllm.spec import LaunchSpec
launcher = RayLauncher(sys.argv[1])
spec = LaunchSpec.model_validate_json(sys.argv[2])
print(asyncio.run(launcher.start(spec)).url if sys.argv[3] == "start" else asyncio.run(launcher.stop(spec.name)))
"""
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.timeout(900)
def test_one_instance_over_two_machines(vllm_python: str, tiny_model: Path, tmp_path: Path) -> None:
    # The CPU build's own script `vllm` does not run; an environment in which it does stands before it.
    scripts = tmp_path / "environment" / "bin"
    scripts.mkdir(parents=True)
    (tmp_path / "environment/lib/python3/site-packages/vllm-0.dist-info").mkdir(parents=True)
    (scripts / "vllm").write_text(f'#!/bin/sh\nexec {vllm_python} {ROOT}/workers/vllm/command_line.py "$@"\n')
    (scripts / "vllm").chmod(0o755)
    spec = {
        "name": "wide", "model": MODEL, "source": str(tiny_model), "node": "pair", "tensor_parallel": 2,
        "max_model_len": 512, "max_num_seqs": 4, "cpu_kv_bytes": 2**28, "extra_args": ["--dtype", "float32"],
        "environment": ENVIRONMENT,
    }  # fmt: skip
    cluster = RayCluster(ray_python(), tmp_path, VLLM_PYTHON=str(scripts / "python"))

    def ask(verb: str) -> str:
        command = [ray_python(), "-c", START, cluster.address, json.dumps(spec), verb]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, env=environment, text=True, check=True, stdout=subprocess.PIPE).stdout.strip()

    try:
        cluster.head()
        for name in ("left", "right"):
            cluster.machine(name, 0, region__us_east=1, gpu__cpu=1, group__pair=1)
        url = ask("start")
        deadline = time.monotonic() + START_LIMIT_S
        while not (answer := complete(url)):
            assert time.monotonic() < deadline, "it does not answer"
            time.sleep(2.0)
        assert answer["usage"]["completion_tokens"] == 8
        assert "-pp2-" in answer["system_fingerprint"]
        assert "rank=1" in (tmp_path / "instances" / "wide.1.log").read_text()
        ask("stop")
        assert not complete(url)
    finally:
        cluster.stop()


def complete(url: str) -> dict:
    """Return the server's answer; empty if there is none."""
    body = {"model": MODEL, "prompt": "the ship", "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except OSError:
        return {}
